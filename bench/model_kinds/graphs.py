"""Graphs written node by node: control flow, boxes that are selected, sequences, and inputs without a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from bench.model_kinds import Kind

Dims = Sequence[int | str]
_node = helper.make_node


def _value(name: str, dims: Dims | None, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def _save(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Mapping[str, np.ndarray] | None = None,
) -> None:
    held = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "model", list(inputs), list(outputs), held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _if(path: Path) -> None:
    branches = {
        name: helper.make_graph([_node("MatMul", ["x", weight], ["out"])], name, [], [_value("out", None)])
        for name, weight in (("then_branch", "w"), ("else_branch", "v"))
    }
    nodes = [
        _node("ReduceSum", ["x"], ["sum"], keepdims=0),
        _node("Greater", ["sum", "zero"], ["above"]),
        _node("If", ["above"], ["y"], **branches),
    ]
    weights = {"w": _random(16, 8), "v": _random(16, 8), "zero": np.array(0, np.float32)}
    _save(path, nodes, [_value("x", ["batch", 16])], [_value("y", ["batch", 8])], weights)


def _loop(path: Path, trips: str = "trips") -> None:
    body = helper.make_graph(
        [
            _node("MatMul", ["state", "w"], ["product"]),
            _node("Tanh", ["product"], ["next"]),
            _node("Identity", ["go"], ["on"]),
        ],
        "body",
        [_value("turn", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("state", None)],
        [_value("on", [], TensorProto.BOOL), _value("next", None)],
    )
    given = [_value("x", ["batch", 16])] + ([_value(trips, [], TensorProto.INT64)] if trips != "trips" else [])
    weights = {"w": _random(16, 16), "yes": np.array(True)} | (
        {"trips": np.array(8, np.int64)} if trips == "trips" else {}
    )
    _save(path, [_node("Loop", [trips, "yes", "x"], ["y"], body=body)], given, [_value("y", ["batch", 16])], weights)


def _open_loop(path: Path) -> None:
    _loop(path, "turns")


def _selected_boxes(path: Path) -> None:
    """Write a detector of one picture that selects its boxes itself, as SSDLite of torchvision does."""
    nodes = [
        _node("Unsqueeze", ["image", "first"], ["batch"]),
        _node("Conv", ["batch", "stem"], ["c"], strides=[4, 4]),
        _node("Relu", ["c"], ["r"]),
        _node("Conv", ["r", "box_head"], ["b"]),
        _node("Conv", ["r", "score_head"], ["s"]),
        _node("Reshape", ["b", "box_shape"], ["b4"]),
        _node("Transpose", ["b4"], ["boxes"], perm=[0, 2, 1]),
        _node("Reshape", ["s", "score_shape"], ["s2"]),
        _node("Sigmoid", ["s2"], ["scores"]),
        _node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["picked"]),
        _node("Gather", ["picked", "column"], ["index"], axis=1),
        _node("Squeeze", ["boxes", "first"], ["flat"]),
        _node("Gather", ["flat", "index"], ["found"]),
    ]
    weights = {
        "stem": _random(16, 3, 4, 4), "box_head": _random(4, 16, 1, 1), "score_head": _random(3, 16, 1, 1),
        "first": np.array([0]), "box_shape": np.array([1, 4, -1]), "score_shape": np.array([1, 3, -1]),
        "most": np.array([20]), "overlap": np.array([0.5], np.float32), "least": np.array([0.1], np.float32),
        "column": np.array(2),
    }  # fmt: skip
    _save(path, nodes, [_value("image", [3, 320, 320])], [_value("found", ["boxes", 4])], weights)


def _sequence(path: Path) -> None:
    part = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    nodes = [_node("MatMul", ["x", "w"], ["y"]), _node("SplitToSequence", ["y"], ["parts"], axis=0)]
    _save(path, nodes, [_value("x", ["batch", 16])], [helper.make_value_info("parts", part)], {"w": _random(16, 8)})


def _sequence_given(path: Path) -> None:
    part = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 4]))
    nodes = [_node("ConcatFromSequence", ["parts"], ["y"], axis=0)]
    _save(path, nodes, [helper.make_value_info("parts", part)], [_value("y", ["n", 4])])


def _resize(path: Path) -> None:
    """Write a model whose inner shape a value that is sent decides."""
    nodes = [_node("Resize", ["images", "", "", "sizes"], ["larger"]), _node("Relu", ["larger"], ["y"])]
    sizes = _value("sizes", [4], TensorProto.INT64)
    _save(path, nodes, [_value("images", [1, 3, 32, 32]), sizes], [_value("y", None)])


def _functions(path: Path) -> None:
    """Write a model that calls functions of its own, one within another, as the exporter from PyTorch may."""
    opset, own = helper.make_opsetid("", 17), helper.make_opsetid("own", 1)
    scale = helper.make_function("own", "Scale", ["a", "b"], ["c"], [_node("MatMul", ["a", "b"], ["c"])], [opset])
    inner = [_node("Scale", ["a", "b"], ["t"], domain="own"), _node("Gelu", ["t"], ["c"], domain="own")]
    gelu = helper.make_function(
        "own", "Gelu", ["a"], ["b"], [_node("Sigmoid", ["a"], ["s"]), _node("Mul", ["a", "s"], ["b"])], [opset]
    )
    layer = helper.make_function("own", "Layer", ["a", "b"], ["c"], inner, [opset, own])
    graph = helper.make_graph(
        [_node("Layer", ["x", "w"], ["h"], domain="own"), _node("Layer", ["h", "v"], ["y"], domain="own")],
        "model", [_value("x", ["batch", 16])], [_value("y", ["batch", 8])],
        [numpy_helper.from_array(_random(16, 32), "w"), numpy_helper.from_array(_random(32, 8), "v")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[opset, own], functions=[scale, gelu, layer], ir_version=8), path)


def _old(path: Path) -> None:
    """Write a model as exporters of 2018 did: opset 7, weights among the inputs, names in another script."""
    nodes = [
        _node("Conv", ["画像", "w"], ["c"], pads=[1, 1, 1, 1]),
        _node("BatchNormalization", ["c", "s", "s", "s", "s"], ["n"]),
        _node("Relu", ["n"], ["r"]),
        _node("GlobalAveragePool", ["r"], ["p"]),
        _node("Reshape", ["p", "shape"], ["f"]),
        _node("Gemm", ["f", "v", "b"], ["スコア"]),
    ]
    weights = {"w": _random(8, 3, 3, 3), "s": np.ones(8, np.float32), "shape": np.array([0, -1]), "v": _random(8, 4),
               "b": _random(4)}  # fmt: skip
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    inputs = [_value(one.name, one.dims, one.data_type) for one in held]
    graph = helper.make_graph(
        nodes, "model", [_value("画像", ["batch", 3, 32, 32]), *inputs], [_value("スコア", ["batch", 4])], held
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=3), path)


def _computed_padding(path: Path) -> None:
    """Write a convolution whose padding follows from the sides, as timm exports networks that TensorFlow trained."""
    nodes = []
    for side, axis in (("height", 2), ("width", 3)):
        nodes += [
            _node("Shape", ["x"], [side], start=axis, end=axis + 1),
            _node("Cast", [side], [f"{side}_f"], to=TensorProto.FLOAT),
            _node("Div", [f"{side}_f", "two"], [f"{side}_half"]),
            _node("Ceil", [f"{side}_half"], [f"{side}_out"]),
            _node("Mul", [f"{side}_out", "two"], [f"{side}_read"]),
            _node("Add", [f"{side}_read", "one"], [f"{side}_need"]),
            _node("Sub", [f"{side}_need", f"{side}_f"], [f"{side}_short"]),
            _node("Clip", [f"{side}_short", "zero"], [f"{side}_more"]),
            _node("Cast", [f"{side}_more"], [f"{side}_pad"], to=TensorProto.INT64),
        ]
    nodes += [
        _node("Concat", ["before", "height_pad", "width_pad"], ["pads"], axis=0),
        _node("Pad", ["x", "pads"], ["padded"]),
        _node("Conv", ["padded", "w"], ["y"], strides=[2, 2]),
    ]
    weights: dict[str, np.ndarray] = {
        **{"one": np.ones(1, np.float32), "two": np.full(1, 2, np.float32), "zero": np.array(0, np.float32)},
        **{"before": np.zeros(6, np.int64), "w": _random(8, 3, 3, 3)},
    }
    dims: Dims = ["batch", 3, "height", "width"]
    _save(path, nodes, [_value("x", dims)], [_value("y", ["batch", 8, "h", "w"])], weights)


GRAPHS = (
    Kind("padding computed from the sides", _computed_padding),
    Kind("functions of the model's own", _functions),
    Kind("opset 7, names in Japanese", _old),
    Kind("If", _if),
    Kind("Loop", _loop),
    Kind("Loop, turns sent with each request", _open_loop),
    Kind("SSDLite-like, boxes selected inside", _selected_boxes),
    Kind("sequence as output", _sequence),
    Kind("sequence as input", _sequence_given),
    Kind("shape decided by a value that is sent", _resize),
)
