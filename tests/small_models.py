"""Small ONNX models written for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

Dims = Sequence[int | str | None]


def write_model(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims | None],
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    types: Mapping[str, int] | None = None,
) -> Path:
    """Write a model of float tensors, where ``types`` does not say otherwise, and return its path."""
    kinds = types or {}

    def info(name: str, dims: Dims | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), dims)

    graph = helper.make_graph(
        list(nodes),
        "test",
        [info(name, dims) for name, dims in inputs.items()],
        [info(name, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


def floats(*shape: int) -> np.ndarray:
    """Return float32 numbers that are all different."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype=np.float32) / max(1, size) - 0.5).reshape(shape)


def integers(*values: int) -> np.ndarray:
    """Return a list of int64."""
    return np.array(values, np.int64)


def write_text_model(path: Path, width: int = 64, tokens: int = 256) -> Path:
    """Write a model of token ids ``[batch, seq]``: a table, attention over the sequence, and its mean."""
    node = helper.make_node
    return write_model(
        path,
        [
            node("Gather", ["table", "ids"], ["x"]),
            node("MatMul", ["x", "w"], ["q"]),
            node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
            node("MatMul", ["q", "k"], ["scores"]),
            node("Softmax", ["scores"], ["parts"], axis=-1),
            node("MatMul", ["parts", "x"], ["mixed"]),
            node("ReduceMean", ["mixed"], ["y"], axes=[1], keepdims=0),
        ],
        {"ids": ["batch", "seq"]},
        {"y": ["batch", width]},
        {"table": floats(tokens, width), "w": floats(width, width)},
        types={"ids": TensorProto.INT64},
    )
