"""Writes ONNX networks node by node."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, exp, pi, prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_OPSETS = [helper.make_opsetid("", 17)]
#: IR version in which initializers are constants, not inputs that a caller may replace.
IR_VERSION = helper.find_min_ir_version_for(_OPSETS)


class Network:
    """Builder of a network: nodes in order, shapes of weights still to be drawn, and constants."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.constants: list[TensorProto] = []

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        name = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, *shape: int) -> str:
        """Declare a weight and return its name."""
        name = f"weight_{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def constant(self, *values: int) -> str:
        """Add a constant list of whole numbers and return its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def scalar(self, value: float) -> str:
        """Add a constant number and return its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def dense(self, x: str, features: int, outputs: int) -> str:
        """Multiply the last axis by a matrix and add a bias."""
        return self.add("Add", self.add("MatMul", x, self.weight(features, outputs)), self.weight(outputs))

    def convolve(self, x: str, channels: int, outputs: int, stride: int = 1) -> str:
        """Convolve by 3×3, normalise and rectify."""
        x = self.add(
            "Conv", x, self.weight(outputs, channels, 3, 3), kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2
        )
        x = self.add("BatchNormalization", x, *(self.weight(outputs) for _ in range(4)))
        return self.add("Relu", x)

    def finish(
        self, name: str, x: TensorProto.DataType, shape: list[int | str], y: list[int | str], seed: int
    ) -> ModelProto:
        """Name the last value ``output``, draw the weights and return the model."""
        # Every network has the same name of its output, independent of its last node.
        self.nodes[-1].output[0] = "output"
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("input_ids" if x == TensorProto.INT64 else "input", x, shape)],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, y)],
            self.constants,
        )
        for weight, values in random_weights(self.nodes, self.shapes, seed).items():
            graph.initializer.append(numpy_helper.from_array(values, weight))
        return helper.make_model(graph, ir_version=IR_VERSION, producer_name="gpuprof", opset_imports=_OPSETS)


Floats = npt.NDArray[np.float32]

_PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
_NORMALISATIONS = {"BatchNormalization", "LayerNormalization"}
_ROLES = {1: "scale", 2: "shift", 3: "mean", 4: "variance"}


def random_weights(
    nodes: Sequence[NodeProto], shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> dict[str, Floats]:
    """Return float weights for ``nodes``, each drawn according to its role.

    Kernels and matrices are drawn as proposed by He et al. (2015). Normalisations get the mean and variance estimated
    for their input, like after training, so that sums of many blocks do not diverge. ``nodes``: in topological order;
    ``shapes``: shapes of the weights by name; ``seed``: a weight's values depend on the seed and the weight's name
    only.
    """
    weights: dict[str, Floats] = {}
    moments: dict[str, _Moments] = {}
    last = next((node for node in reversed(nodes) if node.op_type in _PRODUCTS), None)
    for node in nodes:
        before = [moments.get(name, _STANDARD) for name in node.input if name not in shapes] or [_STANDARD]
        after = _moments(node, before)
        for position, name in enumerate(node.input):
            if name in shapes and name not in weights:
                # The seed uses the name's checksum, because Python's hash of strings differs between processes.
                random = np.random.default_rng([seed, zlib.crc32(name.encode())])
                weights[name] = _draw(random, node, position, shapes[name], before[0].square)
                if node is last and position == 1:
                    # The final scores get size 1, because softmax of larger scores gives almost all to a single class.
                    weights[name] /= np.float32(sqrt(2 * before[0].square))
        moments |= dict.fromkeys(node.output, after)
    return weights


@dataclass(frozen=True, slots=True)
class _Moments:
    """Mean and mean square of a tensor's values, assumed to be normal."""

    mean: float
    square: float


_STANDARD = _Moments(0.0, 1.0)
#: Moments of the maximum of a pooling window's nine rectified normal values, relative to a single value's.
_MAX_POOL = _Moments(3.6, 5.0)


def _moments(node: NodeProto, before: list[_Moments]) -> _Moments:
    """Estimate the moments of a node's output from its inputs' moments."""
    x = before[0]
    if node.op_type in _PRODUCTS:
        return _Moments(0.0, 2 * x.square)
    if node.op_type in _NORMALISATIONS:
        return _STANDARD
    if node.op_type == "Relu":
        return _relu_moments(x)
    if node.op_type == "MaxPool":
        return _Moments(_MAX_POOL.mean * x.mean, _MAX_POOL.square * x.square)
    mean, variance = sum(y.mean for y in before), sum(y.square - y.mean**2 for y in before)
    if node.op_type in ("Add", "Sum"):
        return _Moments(mean, mean**2 + variance)
    if node.op_type == "Concat":
        return _Moments(mean / len(before), sum(y.square for y in before) / len(before))
    return x


def _relu_moments(x: _Moments) -> _Moments:
    deviation = sqrt(max(x.square - x.mean**2, 1e-12))
    ratio = x.mean / deviation
    below = (1 + erf(ratio / sqrt(2))) / 2
    density = exp(-(ratio**2) / 2) / sqrt(2 * pi)
    return _Moments(x.mean * below + deviation * density, x.square * below + x.mean * deviation * density)


def _draw(random: np.random.Generator, node: NodeProto, position: int, shape: tuple[int, ...], square: float) -> Floats:
    if node.op_type in _PRODUCTS and position == 1:
        values = random.standard_normal(shape, dtype=np.float32)
        values *= np.float32(sqrt(2 / _fan_in(node, shape)))
        return values
    role = _ROLES.get(position, "") if node.op_type in _NORMALISATIONS else ""
    if role == "variance":
        return (random.uniform(0.8, 1.25, shape) * square).astype(np.float32)
    if role == "scale" or node.op_type == "Mul":
        return random.uniform(0.8, 1.25, shape).astype(np.float32)
    return (random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)).astype(np.float32)


def _fan_in(node: NodeProto, shape: tuple[int, ...]) -> int:
    if node.op_type in ("Conv", "ConvTranspose"):
        return prod(shape[1:])
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    return shape[-1] if transposed else shape[-2]
