"""Determines the runtime, execution mode and precision with which a session executes a model."""

from __future__ import annotations

from collections import Counter

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph, Op
from gpuprof.domain.runtime_variant import RuntimeVariant

_EIGHT_BITS = frozenset({"int8", "uint8"})
_ARITHMETIC = ("float", "bfloat", "complex")


def executed_variant(graph: ModelGraph, device: Device) -> RuntimeVariant:
    """Return the variant of ``graph`` executed by a session of `open_session` on ``device``."""
    return RuntimeVariant("onnxruntime", "fused", arithmetic_precision(graph, device))


def arithmetic_precision(graph: ModelGraph, device: Device) -> str | None:
    """Return the type in which most of a model's FLOPs are computed; None if unknown.

    The inputs' type may differ: a language model takes whole numbers. On a GPU with TF32, products of float32 are
    computed in TF32, as configured in every session.
    """
    work: Counter[str] = Counter()
    for op in graph.ops:
        if op.flops and (dtype := _operand_type(op)) is not None:
            work[dtype] += op.flops
    if not work:
        dtypes = [tensor.dtype for tensor in (*graph.weights, *graph.inputs) if tensor.dtype.startswith(_ARITHMETIC)]
        work.update(dtypes)
    if not work:
        return None
    ((main_type, _),) = work.most_common(1)
    return "tf32" if main_type == "float32" and "tfloat32" in device.flops_per_s else main_type


def _operand_type(op: Op) -> str | None:
    """Return the type of an op's first operand that is not an index; ``int8`` for signed and unsigned eight bits."""
    for tensor in op.inputs:
        if tensor.dtype in _EIGHT_BITS:
            return "int8"
        if tensor.dtype.startswith(_ARITHMETIC):
            return tensor.dtype
    return None
