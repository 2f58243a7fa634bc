"""Makes a single-op model, so that the op can be measured alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.sizes import Sizes
from gpuprof.errors import InputError
from gpuprof.graph.element_types import elem_type
from gpuprof.graph.file import read_onnx
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph, load_nodes, require_sizes

Array = npt.NDArray[np.generic]
_OLDEST_IR = 4  # from this version on a weight need not also be an input
#: Weights repeat these values: drawing millions for each op would take longer than measuring the op. All are at least
#: 0.1, to avoid divisions by zero and denormal numbers, which a CPU computes slowly.
_BLOCK = np.random.default_rng(0).uniform(0.1, 1.0, 4096).astype(np.float32)


@dataclass(frozen=True, slots=True)
class OpSource:
    """An op and its origin."""

    op: Op
    node: NodeProto
    values: Mapping[str, Array]  #: Small values of the model known before it runs: shapes, axes, scales.
    model: str  #: Name of the model.
    path: Path
    batch: int


def distinct_ops(path: Path, batch: int, name: str, sizes: Sizes = ()) -> dict[str, OpSource]:
    """Return the ops of a model at a batch size by their signature, the first of each.

    Raises `InputError` when the model cannot be read, or a dimension has neither a given nor a usual size.
    """
    graph = require_sizes(load_graph(path, batch, name, dict(sizes)))
    nodes, values = load_nodes(path, batch, dict(graph.sizes))
    by_signature: dict[str, OpSource] = {}
    for op, node in zip(graph.ops, nodes, strict=True):
        by_signature.setdefault(op.signature, OpSource(op, node, values, name, path, batch))
    return by_signature


def write_op_model(source: OpSource, path: Path) -> dict[str, Array]:
    """Write the op as a separate model to ``path`` and return inputs for the model.

    Small weights keep their values, since they may be shapes; large weights are random. Values computed from shapes
    alone become constants. Raises `InputError` when the op cannot stand alone: its subgraphs take values from outside.
    """
    op = source.op
    tensors = {tensor.name: tensor for tensor in op.inputs}
    if set(tensors) - set(source.node.input):
        raise InputError(f"{op.name} ({op.op_type}) holds subgraphs that take values from outside it")
    constants = _constants(source, tensors)
    free = tuple(tensor for name, tensor in tensors.items() if name not in constants)
    onnx.save(_model(source, constants, free), str(path))
    alone = ModelGraph(op.name, source.batch, (op,), free, op.outputs, op.weights, 0, str(path), "")
    values = random_inputs(alone)
    return {tensor.name: source.values.get(tensor.name, values[tensor.name]) for tensor in free}


def _constants(source: OpSource, tensors: Mapping[str, Tensor]) -> dict[str, TensorProto]:
    """Return the constant inputs: weights, and known shapes unless all inputs would then be constant."""
    weights = {tensor.name for tensor in source.op.weights}
    shapes = {name for name in tensors if name in source.values}
    # An op with only constant inputs would be folded away, leaving nothing to measure.
    chosen = weights | shapes if set(tensors) - weights - shapes else weights
    return {name: _tensor(tensors[name], source.values.get(name)) for name in tensors if name in chosen}


def _tensor(tensor: Tensor, value: Array | None) -> TensorProto:
    if value is None:
        dtype: Any = helper.tensor_dtype_to_np_dtype(elem_type(tensor.dtype))
        integer = tensor.dtype.startswith(("int", "uint", "bool"))
        value = np.zeros(tensor.shape, dtype) if integer else np.resize(_BLOCK, tensor.shape).astype(dtype)
    return numpy_helper.from_array(value, tensor.name)


def _model(source: OpSource, constants: Mapping[str, TensorProto], free: tuple[Tensor, ...]) -> ModelProto:
    whole = read_onnx(source.path).model
    graph = helper.make_graph(
        [source.node],
        source.op.name,
        [helper.make_tensor_value_info(t.name, elem_type(t.dtype), t.shape) for t in free],
        [helper.make_tensor_value_info(t.name, elem_type(t.dtype), t.shape) for t in source.op.outputs],
        list(constants.values()),
    )
    return helper.make_model(
        graph, opset_imports=list(whole.opset_import), ir_version=max(_OLDEST_IR, whole.ir_version)
    )
