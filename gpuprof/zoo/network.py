"""Writes ONNX networks node by node."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpuprof.zoo.weights import random_weights

_OPSET, _IR_VERSION = 17, 8


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
        return helper.make_model(
            graph, ir_version=_IR_VERSION, producer_name="gpuprof", opset_imports=[helper.make_opsetid("", _OPSET)]
        )
