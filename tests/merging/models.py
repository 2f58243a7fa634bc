"""Small models for the merger's tests: a transformer and a residual network, and copies fine-tuned from a layer on."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Dims = list[int | str]


class Builder:
    """Collects nodes and weights of a graph."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self._random = np.random.default_rng(seed)

    def weight(self, *shape: int, scale: float = 0.2) -> str:
        return self.constant((scale * self._random.standard_normal(shape)).astype(np.float32))

    def constant(self, value: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def model(
        self, inputs: dict[str, tuple[int, Dims]], outputs: dict[str, tuple[int, Dims]], opset: int = 17
    ) -> ModelProto:
        infos = [
            [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in side.items()]
            for side in (inputs, outputs)
        ]
        graph = helper.make_graph(self.nodes, "g", infos[0], infos[1], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 9
        onnx.checker.check_model(model)
        return model


def transformer(layers: int = 3, seed: int = 0) -> ModelProto:
    """Return an encoder on token ids, as exporters write one: shapes are computed from the input."""
    b, width, length = Builder(seed), 32, 6
    mask = b.add("Cast", "mask", to=TensorProto.FLOAT)
    mask = b.add(
        "Mul", b.add("Sub", b.constant(np.array([1], np.float32)), mask), b.constant(np.array([-1e4], np.float32))
    )
    mask = b.add("Unsqueeze", mask, b.constant(np.array([1, 2], np.int64)))
    x = b.add("Add", b.add("Gather", b.weight(50, width), "ids"), b.weight(length, width))
    for _ in range(layers):
        x = _layer(b, x, mask, width)
    first = b.add("Gather", x, b.constant(np.array(0, np.int64)), axis=1)
    b.add("Gemm", first, b.weight(4, width), b.weight(4), transB=1)
    b.nodes[-1].output[0] = "logits"
    shape: Dims = ["batch", length]
    return b.model(
        {"ids": (TensorProto.INT64, shape), "mask": (TensorProto.INT64, shape)},
        {"logits": (TensorProto.FLOAT, ["batch", 4])},
    )


def _layer(b: Builder, x: str, mask: str, width: int, heads: int = 2) -> str:
    shape = b.add("Shape", x)
    parts = [b.add("Gather", shape, b.constant(np.array([i], np.int64)), axis=0) for i in (0, 1)]
    split = b.add("Concat", *parts, b.constant(np.array([heads, width // heads], np.int64)), axis=0)
    joined = b.add("Concat", *parts, b.constant(np.array([width], np.int64)), axis=0)

    def head() -> str:
        product = b.add("Add", b.add("MatMul", x, b.weight(width, width)), b.weight(width))
        return b.add("Reshape", product, split)

    q, k, v = (b.add("Transpose", head(), perm=perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    scores = b.add("Div", b.add("MatMul", q, k), b.constant(np.array([(width // heads) ** 0.5], np.float32)))
    attention = b.add("MatMul", b.add("Softmax", b.add("Add", scores, mask), axis=-1), v)
    attention = b.add("Reshape", b.add("Transpose", attention, perm=[0, 2, 1, 3]), joined)
    attention = b.add("Add", b.add("MatMul", attention, b.weight(width, width)), b.weight(width))
    x = b.add("LayerNormalization", b.add("Add", x, attention), b.weight(width), b.weight(width), axis=-1)
    inner = b.add("Relu", b.add("Add", b.add("MatMul", x, b.weight(width, 2 * width)), b.weight(2 * width)))
    inner = b.add("Add", b.add("MatMul", inner, b.weight(2 * width, width)), b.weight(width))
    return b.add("LayerNormalization", b.add("Add", x, inner), b.weight(width), b.weight(width), axis=-1)


def residual(blocks: int = 3, channels: int = 8, seed: int = 0, batch: int | str = "batch") -> ModelProto:
    """Return a small residual network on images."""
    b = Builder(seed)
    x = b.add("Relu", b.add("Conv", "image", b.weight(channels, 3, 3, 3), b.weight(channels), pads=[1, 1, 1, 1]))
    for _ in range(blocks):
        y = b.add("Relu", b.add("Conv", x, b.weight(channels, channels, 3, 3), b.weight(channels), pads=[1, 1, 1, 1]))
        y = b.add("Conv", y, b.weight(channels, channels, 3, 3), b.weight(channels), pads=[1, 1, 1, 1])
        x = b.add("Relu", b.add("Add", x, y))
    x = b.add("Flatten", b.add("GlobalAveragePool", x))
    b.add("Gemm", x, b.weight(5, channels), b.weight(5), transB=1)
    b.nodes[-1].output[0] = "scores"
    return b.model({"image": (TensorProto.FLOAT, [batch, 3, 8, 8])}, {"scores": (TensorProto.FLOAT, [batch, 5])})


def finetune_model(model: ModelProto, frozen: float, seed: int = 1) -> ModelProto:
    """Return a copy whose weights after the first ``frozen`` part of them are changed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    random = np.random.default_rng(seed)
    floats = [t for t in copy.graph.initializer if t.data_type == TensorProto.FLOAT and np.prod(t.dims) > 1]
    for tensor in floats[round(frozen * len(floats)) :]:
        value = numpy_helper.to_array(tensor)
        changed = (value + 0.05 * random.standard_normal(value.shape)).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    return copy


def save(model: ModelProto, directory: Path, name: str) -> Path:
    """Write a model and return its path."""
    path = directory / f"{name}.onnx"
    onnx.save_model(model, str(path))
    return path


def recurrent(op_type: str = "LSTM", vocabulary: int = 200, seed: int = 0, head_seed: int = 0) -> ModelProto:
    """Return a classifier of token ids: a table, a recurrent op, and a head of its own seed."""
    b, head, width = Builder(seed), Builder(head_seed + 1000), 32
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type]
    table = b.add("Gather", b.weight(vocabulary, width), "ids")
    x = b.add("Transpose", table, perm=[1, 0, 2])
    held = [b.weight(1, gates * width, width), b.weight(1, gates * width, width), b.weight(1, 2 * gates * width)]
    every = b.add(op_type, x, *held, hidden_size=width)
    last = b.add("Gather", every, b.constant(np.array(-1, np.int64)), axis=0)
    last = b.add("Squeeze", last, b.constant(np.array([0], np.int64)))
    head.weight(width, 4)
    weights = b.constant(numpy_helper.to_array(head.weights[0]))
    b.add("MatMul", last, weights)
    b.nodes[-1].output[0] = "scores"
    return b.model({"ids": (TensorProto.INT64, ["batch", 5])}, {"scores": (TensorProto.FLOAT, ["batch", 4])})
