"""Small ONNX models whose batch is free."""

from pathlib import Path

import numpy as np
from onnx import helper

from tests.small_models import write_model


def write_mlp(path: Path, width: int = 64, layers: int = 2, batch: int | str = "n") -> Path:
    """MatMul, Add and Relu, ``layers`` times."""
    nodes, weights = [], {}
    draw = np.random.default_rng(0)
    name = "x"
    for layer in range(layers):
        weights[f"w{layer}"] = draw.standard_normal((width, width), np.float32)
        weights[f"b{layer}"] = np.zeros(width, np.float32)
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], f"matmul{layer}"))
        nodes.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], f"add{layer}"))
        nodes.append(helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"], f"relu{layer}"))
        name = f"r{layer}"
    return write_model(path, nodes, {"x": [batch, width]}, {name: [batch, width]}, weights)


def write_convs(path: Path, side: int = 16, channels: int = 16) -> Path:
    """Conv, BatchNormalization, Relu twice, with a skip: what runtimes fuse and lay out anew."""
    draw = np.random.default_rng(0)
    weights, nodes = {}, []
    last = "x"
    for layer, taken in enumerate((3, channels)):
        normal = [f"{name}{layer}" for name in ("s", "o", "m", "v")]
        weights[f"w{layer}"] = draw.standard_normal((channels, taken, 3, 3), np.float32)
        weights |= {name: np.ones(channels, np.float32) for name in normal}
        nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], f"conv{layer}", pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("BatchNormalization", [f"c{layer}", *normal], [f"n{layer}"], f"norm{layer}"))
        nodes.append(helper.make_node("Relu", [f"n{layer}"], [f"r{layer}"], f"relu{layer}"))
        last = f"r{layer}"
    nodes.append(helper.make_node("Add", ["r0", "r1"], ["y"], "skip"))
    return write_model(path, nodes, {"x": ["n", 3, side, side]}, {"y": ["n", channels, side, side]}, weights)


def write_strange(path: Path) -> Path:
    """An operator of a domain that no runtime has."""
    node = helper.make_node("Nonsense", ["x"], ["y"], "odd", domain="example.nowhere")
    return write_model(path, [node], {"x": ["n", 4]}, {"y": ["n", 4]})
