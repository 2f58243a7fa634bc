"""Prepares a graph for memory estimates in a precision: types of tensors, no scores of fused attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.estimators.cross_gpu.node_groups import CONVOLUTIONS, PRODUCTS, NodeGroups

#: Types that a runtime converts to the chosen precision; narrower types and integers stay.
_CHANGED = frozenset({"float64", "float32", "float16", "bfloat16"})
#: Catalogue's name of a precision → type of activations and other weights, type of the weights of products.
_TYPES = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "tfloat32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float8": ("float16", "float8e4m3fn"),
    "int8": ("float16", "int8"),
}
#: Precisions with attention as a single kernel.
NARROW = frozenset({"float16", "bfloat16", "float8", "int8"})


def hold_graph(graph: ModelGraph, precision: str, *, retyped: bool) -> ModelGraph:
    """Return the graph with the tensors that a runtime holds in memory when it computes products in ``precision``.

    ``retyped``: whether the precision differs from the file's, so that weights and activations change type.
    """
    ops = _join_attention(graph.ops) if precision in NARROW else graph.ops
    if not retyped:
        return replace(graph, ops=ops)
    general, operand = _TYPES[precision]
    multiplied = {weight.name for op in ops if op.op_type in PRODUCTS | CONVOLUTIONS for weight in op.weights}

    def retype(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        types = (
            (tensor, operand if tensor.name in multiplied and len(tensor.shape) > 1 else general) for tensor in tensors
        )
        return tuple(replace(tensor, dtype=dtype) if tensor.dtype in _CHANGED else tensor for tensor, dtype in types)

    changed = (replace(op, inputs=retype(op.inputs), outputs=retype(op.outputs)) for op in ops)
    inputs, outputs = retype(graph.inputs), retype(graph.outputs)
    return replace(graph, ops=tuple(changed), inputs=inputs, outputs=outputs, weights=retype(graph.weights))


def _join_attention(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the ops with each attention joined to a single op that reads all outside inputs of its ops."""
    joined: dict[int, Op] = {}
    inside: set[int] = set()
    for last, group in NodeGroups(ops, fused=False, narrow=True).attention.items():
        outputs = {tensor.name for place in group for tensor in ops[place].outputs}
        inputs = {t.name: t for place in sorted(group) for t in ops[place].inputs if t.name not in outputs}
        joined[last] = replace(ops[last], inputs=tuple(inputs.values()))
        inside.update(group)
    return tuple(joined.get(place, op) for place, op in enumerate(ops) if place not in inside or place in joined)
