"""Whether a graph's ops show that the items of a batch are computed apart, so that the model need not be run.

Only what is certain counts: each op must be one of those below, its first dimension the batch. Of everything else
nothing is said; `gpuprof.runtime.batch_items` then runs the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.graph.values import KNOWN_OPS, Array

_ELEMENTWISE = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "Identity", "Elu", "Selu", "HardSigmoid", "HardSwish",
        "Softplus", "Erf", "Gelu", "Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Cast", "Add", "Sub", "Mul",
        "Div", "Sum", "Max", "Min", "Pow", "PRelu", "Where", "And", "Or", "Xor", "Not", "Equal", "Less", "LessOrEqual",
        "Greater", "GreaterOrEqual", "IsNaN",
    }
)  # fmt: skip
#: Ops of images, whose first input has the items in its first dimension; the others are weights.
_BY_ITEM = frozenset(
    {
        "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LRN",
        "BatchNormalization", "InstanceNormalization", "Dropout",
    }
)  # fmt: skip
#: Order stays, so that the items stay apart wherever the first dimension does.
_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_REDUCING = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"})


@dataclass(frozen=True, slots=True)
class _KnownTensors:
    batch: int
    values: Mapping[str, Array]  #: Small values that hang on shapes and constants alone.
    items: set[str]  #: Tensors whose rows are the items: each follows from that item alone, in the same way.
    sizes: set[str] = field(default_factory=set)  #: What follows from how many items there are, not what they hold.


def computes_items_apart(
    graph: ModelGraph, batched: Iterable[str], batch: int, values: Mapping[str, Array] | None = None
) -> bool:
    """Return whether no output of ``graph`` can mix the items of its batch; False also where that is not known.

    ``graph``: bound to ``batch``, more than one; ``batched``: the inputs whose first dimension is the batch; there must
    be no others; ``values``: small values that are known before the model runs, as `gpuprof.graph.load.load_nodes`
    gives them.
    """
    seen = _KnownTensors(batch, values or {}, set(batched))
    if any(one.name not in seen.items or one.shape[:1] != (batch,) for one in graph.inputs):
        return False
    for op in graph.ops:
        constants = {one.name for one in op.weights}
        free = [one for one in op.inputs if one.name not in constants]
        names = {one.name for one in op.outputs}
        is_size = op.op_type == "Shape" or (op.op_type in KNOWN_OPS and all(one.name in seen.sizes for one in free))
        # Ops of other domains may have the name of one below and do something else.
        if op.domain not in ("", "ai.onnx"):
            return False
        is_apart = _repeats_constant(op, seen) or _keeps_items_apart(op, seen)
        if not is_apart and not is_size:
            return False
        for known in ([seen.items] if is_apart else []) + ([seen.sizes] if is_size else []):
            known.update(names)
    return all(one.name in seen.items for one in graph.outputs)


def _repeats_constant(op: Op, seen: _KnownTensors) -> bool:
    """Return whether an op gives every item the same values of the file, as position ids are expanded."""
    first = op.inputs[0] if op.op_type == "Expand" else None
    if first is None or first.name not in {one.name for one in op.weights}:
        return False
    others = all(one.name in seen.sizes for one in op.inputs[1:])
    return others and op.outputs[0].shape[:1] == (seen.batch,) and _is_alike_for_all(first, len(op.outputs[0].shape))


def _gathers_own_item(op: Op, seen: _KnownTensors) -> bool:
    """Return whether GatherND takes each row from the item with the row's number, as masks of attention are read."""
    data, index = op.inputs
    value = seen.values.get(index.name)
    if data.name not in seen.items or index.name not in seen.sizes or op.attributes.get("batch_dims", 0) != 0:
        return False
    if value is None or value.ndim < 2 or op.outputs[0].shape[:1] != (seen.batch,):
        return False
    rows = np.arange(seen.batch).reshape(-1, *(1,) * (value.ndim - 2))
    return value.shape[0] == seen.batch and bool(np.all(value[..., 0] == rows))


def _keeps_items_apart(op: Op, seen: _KnownTensors) -> bool:
    """Return whether an op of inputs whose items are apart gives outputs whose items are."""
    items, sizes, batch = seen.items, seen.sizes, seen.batch
    if op.op_type == "GatherND":
        return _gathers_own_item(op, seen)
    of_items = [one for one in op.inputs if one.name in items]
    constant = {one.name for one in op.weights}
    others = [one for one in op.inputs if one.name not in items]
    known = all(one.name in constant or (one.name in sizes and op.op_type in _RESHAPING) for one in others)
    if not of_items or not known or any(one.shape[:1] != (batch,) for one in (*of_items, *op.outputs)):
        return False
    first, rank = op.inputs[0], len(of_items[0].shape)
    if op.op_type in _ELEMENTWISE:
        return all(len(one.shape) == rank for one in of_items) and all(_is_alike_for_all(one, rank) for one in others)
    if op.op_type in _BY_ITEM:
        # Normalisation over the batch, or a random mask, mixes items or changes with each run.
        trains = bool(op.attributes.get("training_mode")) or (op.op_type == "Dropout" and len(op.inputs) > 2)
        return of_items == [first] and not trains
    if op.op_type in _RESHAPING:
        return of_items == [first]
    if op.op_type in ("MatMul", "Gemm"):
        return _multiplies_items_apart(op, of_items, others)
    if op.op_type in ("Concat", "Split"):
        return _axis(op, 0, rank) > 0 and (op.op_type == "Split" or not others)
    return _works_on_other_axes(op, of_items, rank)


def _multiplies_items_apart(op: Op, of_items: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether the items are rows of the first factor, or the first of the dimensions that are not multiplied."""
    if op.op_type == "Gemm":
        transposed = bool(op.attributes.get("transA"))
        return of_items == [op.inputs[0]] and not transposed and all(_is_alike_for_all(one, 2) for one in op.inputs[2:])
    if len(of_items) == 2:
        return len(of_items[0].shape) == len(of_items[1].shape) >= 3
    return of_items == [op.inputs[0]] and len(of_items[0].shape) >= 2 and all(len(one.shape) <= 2 for one in others)


def _works_on_other_axes(op: Op, of_items: Sequence[Tensor], rank: int) -> bool:
    """Return whether an op along one axis, or some, leaves the first alone."""
    if op.op_type in ("Softmax", "LogSoftmax", "LayerNormalization"):
        return of_items == [op.inputs[0]] and rank >= 2 and _axis(op, -1, rank) > 0
    if op.op_type in _REDUCING:  # an axis that is reduced has one element
        # Without keepdims the remaining axes move forward, and what comes first need not be the batch any more.
        return of_items == [op.inputs[0]] and bool(op.attributes.get("keepdims", 1))
    if op.op_type == "Transpose":
        order = op.attributes.get("perm")
        return isinstance(order, tuple) and order[0] == 0
    if op.op_type == "Gather":
        by_items = len(of_items) == 1 and of_items[0] == op.inputs[-1] and _axis(op, 0, len(op.inputs[0].shape)) == 0
        return by_items or (of_items == [op.inputs[0]] and _axis(op, 0, rank) > 0)
    return False


def _is_alike_for_all(constant: Tensor, rank: int) -> bool:
    """Return whether a constant is added to, or multiplied with, each item alike."""
    return len(constant.shape) < rank or (len(constant.shape) == rank and constant.shape[0] == 1)


def _axis(op: Op, default: int, rank: int) -> int:
    """Return the axis of an op, counted from the front."""
    axis = op.attributes.get("axis", default)
    return axis % max(1, rank) if isinstance(axis, int) else 0
