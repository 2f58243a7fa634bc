"""Detects models exported in training mode, with outputs that are random or depend on the rest of the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import GraphProto, NodeProto, numpy_helper

from gpuprof.graph.file import read_onnx
from gpuprof.graph.nodes import constant_tensor, graphs_of


def describe_training(path: Path, model: str) -> str | None:
    """Return a remark on a model with active dropout, or normalisation by its batch; None for other models.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    graphs = graphs_of(read_onnx(path).model.graph)
    ops = sorted({node.op_type for graph in graphs for node in graph.node if _is_training_node(node, graph)})
    if not ops:
        return None
    means = {
        "BatchNormalization": "normalises by the batch that a request happens to be in",
        "Dropout": "drops values at random",
    }
    reasons = " and ".join(f"its {op} {means[op]}" for op in ops)
    return f"{model} was exported in training mode: {reasons} (export it after model.eval())"


def _is_training_node(node: NodeProto, graph: GraphProto) -> bool:
    """Return whether a node is in training mode; False for a Dropout with a computed mode."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "BatchNormalization":
        return any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return False
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {n.output[0]: constant_tensor(n) for n in graph.node if n.op_type == "Constant" and n.output}
    mode = constants.get(node.input[2])
    return mode is not None and bool(np.any(numpy_helper.to_array(mode)))
