"""Networks shipped without weights in the ``onnx`` package, built with random weights and a free batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from gpuprof.errors import UnavailableError
from gpuprof.graph.batch_plan import apply_rewrite, plan_rewrite
from gpuprof.graph.file import read_onnx
from gpuprof.graph.load import load_graph
from gpuprof.zoo.weights import random_weights

#: IR version in which initializers are constants, not inputs that a caller may replace.
_IR_VERSION = 8


def build_light(stem: str, seed: int = 0) -> ModelProto:
    """Return the network ``light_<stem>.onnx`` with a free batch and weights as initializers.

    The shipped file computes each weight as a constant of its shape to stay small; the result has no such nodes. Raises
    `UnavailableError` if the installed ``onnx`` package does not ship the network.
    """
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{stem}.onnx"
    if not path.is_file():
        raise UnavailableError(f"the onnx package {onnx.__version__} does not ship {path.name}", "pip install -U onnx")
    shipped = onnx.load(path)
    rewrite = plan_rewrite(read_onnx(path))
    apply_rewrite(shipped, rewrite)
    graph = load_graph(path)
    # The ops of `load_graph` depend on the input; all other nodes computed the weights.
    computed = {tensor.name for op in graph.ops for tensor in op.outputs}
    nodes = [node for node in shipped.graph.node if node.output[0] in computed]
    shapes = {tensor.name: tensor.shape for tensor in graph.weights if tensor.dtype == "float32"}
    return _assemble(shipped, nodes, random_weights(nodes, shapes, seed))


def _assemble(shipped: ModelProto, nodes: list[NodeProto], weights: dict[str, np.ndarray]) -> ModelProto:
    used_names = {name for node in nodes for name in node.input} - set(weights)
    model = ModelProto(ir_version=_IR_VERSION, producer_name="gpuprof", opset_import=shipped.opset_import)
    graph = model.graph
    graph.name = shipped.graph.name
    graph.node.extend(nodes)
    used_tensors = [tensor for tensor in shipped.graph.initializer if tensor.name in used_names]
    graph.initializer.extend(used_tensors)
    for name, values in weights.items():
        graph.initializer.append(numpy_helper.from_array(values, name))
    constants = {tensor.name for tensor in shipped.graph.initializer}
    graph.input.extend(info for info in shipped.graph.input if info.name not in constants)
    graph.output.extend(shipped.graph.output)
    return model
