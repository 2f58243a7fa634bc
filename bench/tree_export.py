"""Writes the trees that LightGBM learned as ONNX models, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET, _ML_OPSET, _IR = 18, 3, 9


def export_trees(booster: Any) -> bytes:
    """Return a trained booster as an ONNX model: a TreeEnsembleRegressor that takes ``features``.

    Raises `ValueError` for splits that gpuprof does not train: categorical ones, or of missing values.
    """
    nodes: dict[str, list[Any]] = {
        name: [] for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    }
    leaves: list[tuple[int, int, float]] = []
    dump = booster.dump_model()
    for number, tree in enumerate(dump["tree_info"]):
        _add_node(tree["tree_structure"], number, nodes, leaves)
    values = np.array(nodes.pop("values"), dtype=np.float64)
    weights = np.array([weight for *_, weight in leaves], dtype=np.float64)
    attributes: dict[str, Any] = {f"nodes_{name}": column for name, column in nodes.items()}
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["features"],
        ["sum"],
        domain="ai.onnx.ml",
        n_targets=1,
        aggregate_function="SUM",
        post_transform="NONE",
        **attributes,
        nodes_values_as_tensor=numpy_helper.from_array(values, "values"),
        target_treeids=[tree for tree, *_ in leaves],
        target_nodeids=[place for _, place, _ in leaves],
        target_ids=[0] * len(leaves),
        target_weights_as_tensor=numpy_helper.from_array(weights, "weights"),
    )
    features = int(dump["max_feature_idx"]) + 1
    graph = helper.make_graph(
        [node],
        "trees",
        [helper.make_tensor_value_info("features", TensorProto.DOUBLE, [None, features])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [None, 1])],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="gpuprof")
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _add_node(
    tree: dict[str, Any], number: int, nodes: dict[str, list[Any]], leaves: list[tuple[int, int, float]]
) -> int:
    """Add a node and those below it; return its number in its tree, less than those of its children."""
    place = sum(1 for tree_index in reversed(nodes["treeids"]) if tree_index == number)
    is_leaf = "leaf_value" in tree
    if not is_leaf and tree["decision_type"] != "<=":
        raise ValueError(f"a split by {tree['decision_type']}")
    row = {
        "treeids": number,
        "nodeids": place,
        "featureids": 0 if is_leaf else tree["split_feature"],
        "modes": "LEAF" if is_leaf else "BRANCH_LEQ",
        "values": 0.0 if is_leaf else tree["threshold"],
        "truenodeids": 0,
        "falsenodeids": 0,
    }
    at = len(nodes["treeids"])
    for name, value in row.items():
        nodes[name].append(value)
    if is_leaf:
        leaves.append((number, place, tree["leaf_value"]))
    else:
        nodes["truenodeids"][at] = _add_node(tree["left_child"], number, nodes, leaves)
        nodes["falsenodeids"][at] = _add_node(tree["right_child"], number, nodes, leaves)
    return place
