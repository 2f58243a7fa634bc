"""Names of ONNX's element types for `gpuprof.domain.model.Tensor`, and output types of ONNX Runtime's own ops.

ONNX has no inference for such ops, which quantised and optimised models have. The runtime infers their types when
loading a model: here, a model of a single node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from onnx import NodeProto, OperatorSetIdProto, TensorProto, TypeProto, ValueInfoProto, helper

from gpuprof.errors import InputError, runtime_errors

_RENAMED = {"FLOAT": "float32", "DOUBLE": "float64"}
_ELEMENT_TYPES: dict[int, str] = {
    int(number): _RENAMED.get(name, name.lower()) for name, number in TensorProto.DataType.items() if number
}
#: ONNX Runtime's log level: errors are exceptions, and log lines would obscure the user's single-line message.
FATAL_ONLY = 4


def dtype_name(elem_type: int) -> str:
    """Return the `Tensor` dtype of an ONNX element type: ``1`` is ``"float32"``.

    Raises `InputError` for an unknown element type.
    """
    name = _ELEMENT_TYPES.get(elem_type)
    if name is None:
        raise InputError(f"ONNX has no element type {elem_type}", "the model is damaged: export it again")
    return name


def elem_type(dtype: str) -> int:
    """Return the ONNX element type of a `Tensor`'s dtype, the inverse of `dtype_name`."""
    return next(number for number, name in _ELEMENT_TYPES.items() if name == dtype)


def runtime_types(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    values: Mapping[str, TensorProto],
    opsets: Iterable[OperatorSetIdProto],
) -> dict[str, TypeProto]:
    """Return the types of a node's outputs by ONNX Runtime; empty if the runtime is missing or lacks the op.

    ``types``: types of the inputs; ``values``: known values of inputs.
    """
    alone = NodeProto.FromString(node.SerializeToString())
    # Names are replaced by numbers, so that equal nodes have the same cache entry.
    alone.name = ""
    inputs = {name: f"i{i}" for i, name in enumerate(dict.fromkeys(name for name in node.input if name))}
    outputs = {name: f"o{i}" for i, name in enumerate(name for name in node.output if name)}
    alone.input[:] = [inputs.get(name, "") for name in node.input]
    alone.output[:] = [outputs.get(name, "") for name in node.output]
    weights = [TensorProto.FromString(value.SerializeToString()) for value in values.values()]
    for weight, name in zip(weights, values, strict=True):
        weight.name = inputs[name]
    infos = [ValueInfoProto(name=inputs[name], type=kind) for name, kind in types.items() if name not in values]
    graph = helper.make_graph([alone], "op", infos, [ValueInfoProto(name=name) for name in outputs.values()], weights)
    model = helper.make_model(graph, opset_imports=list(opsets), ir_version=8)
    answer = _ask(model.SerializeToString(deterministic=True))
    return {name: answer[alias] for name, alias in outputs.items() if alias in answer}


# Cached: a session takes milliseconds to open, and a quantised model has hundreds of such nodes.
@cache
def _ask(model: bytes) -> dict[str, TypeProto]:
    try:
        import onnxruntime as ort
    except ImportError:
        return {}
    options = ort.SessionOptions()
    # Types are inferred without optimisation, which could fold or drop the node.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = FATAL_ONLY
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except runtime_errors():
        return {}
    types = ((value.name, _type(value.type, value.shape)) for value in session.get_outputs())
    return {name: kind for name, kind in types if kind is not None}


def _type(kind: str, shape: Iterable[int | str | None] | None) -> TypeProto | None:
    if not kind.startswith("tensor(") or shape is None:
        return None
    name = kind.removeprefix("tensor(").removesuffix(")")
    elements = elem_type({"float": "float32", "double": "float64"}.get(name, name))
    return helper.make_tensor_type_proto(elements, [dim if isinstance(dim, int) else None for dim in shape])
