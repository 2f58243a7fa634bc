"""Small ONNX models whose batch is free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper, save

OPSET = [helper.make_opsetid("", 17)]


def write_mlp(path: Path, width: int = 64, layers: int = 2, batch: int | str = "n") -> Path:
    """MatMul, Add and Relu, ``layers`` times."""
    nodes, weights = [], []
    draw = np.random.default_rng(0)
    name = "x"
    for layer in range(layers):
        weights.append(numpy_helper.from_array(draw.standard_normal((width, width), np.float32), f"w{layer}"))
        weights.append(numpy_helper.from_array(np.zeros(width, np.float32), f"b{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], f"matmul{layer}"))
        nodes.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], f"add{layer}"))
        nodes.append(helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"], f"relu{layer}"))
        name = f"r{layer}"
    return _save(path, nodes, weights, name, [batch, width])


def write_convs(path: Path, side: int = 16, channels: int = 16) -> Path:
    """Conv, BatchNormalization, Relu twice, with a skip: what runtimes fuse and lay out anew."""
    draw = np.random.default_rng(0)
    weights, nodes = [], []
    last = "x"
    for layer, taken in enumerate((3, channels)):
        kernel = draw.standard_normal((channels, taken, 3, 3), np.float32)
        weights.append(numpy_helper.from_array(kernel, f"w{layer}"))
        weights += [numpy_helper.from_array(np.ones(channels, np.float32), f"{n}{layer}") for n in ("s", "o", "m", "v")]
        nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], f"conv{layer}", pads=[1, 1, 1, 1]))
        normal = [f"c{layer}", *(f"{n}{layer}" for n in ("s", "o", "m", "v"))]
        nodes.append(helper.make_node("BatchNormalization", normal, [f"n{layer}"], f"norm{layer}"))
        nodes.append(helper.make_node("Relu", [f"n{layer}"], [f"r{layer}"], f"relu{layer}"))
        last = f"r{layer}"
    nodes.append(helper.make_node("Add", ["r0", "r1"], ["y"], "skip"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, side, side])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", channels, side, side])
    graph = helper.make_graph(nodes, "convs", [x], [y], weights)
    save(helper.make_model(graph, opset_imports=OPSET, ir_version=8), str(path))
    return path


def write_strange(path: Path) -> Path:
    """An operator of a domain that no runtime has."""
    node = helper.make_node("Nonsense", ["x"], ["y"], "odd", domain="example.nowhere")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    opsets = [*OPSET, helper.make_opsetid("example.nowhere", 1)]
    save(helper.make_model(helper.make_graph([node], "odd", [x], [y]), opset_imports=opsets, ir_version=8), str(path))
    return path


def _save(path: Path, nodes: list[NodeProto], weights: list[TensorProto], output: str, shape: list[int | str]) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, path.stem, [x], [y], weights)
    save(helper.make_model(graph, opset_imports=OPSET, ir_version=8), str(path))
    return path
