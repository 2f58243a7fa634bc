"""Proof from a graph's ops that the items of a batch are computed independently, without a run of the model.

The proof is conservative: each op must be listed below, with the batch, or an equal number of rows for each item, as
its first dimension, both at batch 1 and at another batch. Otherwise the result is open, and
`gpuprof.runtime.batch_items` runs the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.graph.values import KNOWN_OPS, Array

_ELEMENTWISE = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "Identity", "Elu", "Selu", "HardSigmoid", "HardSwish",
        "Softplus", "Erf", "Gelu", "Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Cast", "Add", "Sub", "Mul",
        "Div", "Sum", "Max", "Min", "Pow", "PRelu", "Where", "And", "Or", "Xor", "Not", "Equal", "Less", "LessOrEqual",
        "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "Mod", "Mean", "BitShift", "BitwiseAnd", "BitwiseNot",
        "BitwiseOr", "BitwiseXor", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh",
        "Tan", "Ceil", "Floor", "Round", "Sign", "Celu", "Mish", "Shrink", "Softsign", "Swish", "ThresholdedRelu",
    }
)  # fmt: skip
#: Image ops with the items in the first dimension of the first input; other inputs are weights.
_BY_ITEM = frozenset(
    {
        "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LRN",
        "BatchNormalization", "InstanceNormalization", "Dropout", "ConvInteger", "QLinearConv", "LpPool",
        "GlobalLpPool", "GroupNormalization", "DepthToSpace", "SpaceToDepth", "Tile",
    }
)  # fmt: skip
#: Ops that keep the order of elements, so that items stay apart if the first dimension is kept.
_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_QUANTISING = frozenset({"QuantizeLinear", "DequantizeLinear"})
_REDUCING = frozenset(
    {
        "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
        "ReduceLogSumExp", "ReduceSumSquare",
    }
)  # fmt: skip
#: Deterministic ops: outputs computed from the file's constants alone are the same for every request.
_REPEATABLE = KNOWN_OPS | _ELEMENTWISE | _QUANTISING | {"GatherElements", "Sin", "Cos", "MatMul", "Trilu"}


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A graph at a fixed batch."""

    graph: ModelGraph
    #: Small values determined by shapes and constants, from `gpuprof.graph.load.load_nodes`.
    values: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnownTensors:
    """Classes of a graph's tensors at a batch above 1, by their names."""

    batch: int
    values: Mapping[str, Array]
    values_of_one: Mapping[str, Array]  #: Values at batch 1.
    shapes_of_one: Mapping[str, tuple[int, ...]]  #: Shapes of all tensors at batch 1.
    items: set[str]  #: Tensors with the rows of each item in order, each row depending on its item alone.
    sizes: set[str] = field(default_factory=set)  #: Tensors that depend on the number of items, not on their content.
    #: Tensors independent of the items and of their number, such as the positions in a sequence.
    fixed: set[str] = field(default_factory=set)

    def has_rows_of_items(self, tensor: Tensor) -> bool:
        """Return whether the first dimension is the batch times that of an item, and all others are equal."""
        of_one = self.shapes_of_one.get(tensor.name, ())
        return bool(of_one) and tensor.shape == (self.batch * of_one[0], *of_one[1:])

    def is_same_for_one(self, name: str) -> bool:
        """Return whether a value is known and the same at batch 1."""
        value, of_one = self.values.get(name), self.values_of_one.get(name)
        return value is not None and of_one is not None and np.array_equal(value, of_one)


def computes_items_apart(whole: BoundGraph, alone: BoundGraph, batched: Iterable[str]) -> bool:
    """Return whether no output of a graph can mix the items of its batch; False also where unknown.

    ``whole``: the graph at a batch above 1; ``alone``: the graph at batch 1; ``batched``: the inputs with the batch as
    their first dimension, which must be all inputs.
    """
    shapes = {output.name: output.shape for op in alone.graph.ops for output in op.outputs}
    shapes |= {tensor.name: tensor.shape for tensor in alone.graph.inputs}
    graph = whole.graph
    tensors = KnownTensors(graph.batch, whole.values, alone.values, shapes, set(batched))
    if any(tensor.name not in tensors.items or tensor.shape[:1] != (tensors.batch,) for tensor in graph.inputs):
        return False
    for op in graph.ops:
        # Ops of other domains may have a listed name and another meaning.
        if op.domain not in ("", "ai.onnx") or not _note_outputs(op, tensors):
            return False
    return all(output.name in tensors.items and output.shape[:1] == (tensors.batch,) for output in graph.outputs)


def _note_outputs(op: Op, tensors: KnownTensors) -> bool:
    """Record the classes of an op's outputs; return whether any class applies."""
    constants = {weight.name for weight in op.weights}
    free = [tensor.name for tensor in op.inputs if tensor.name not in constants]
    names = {output.name for output in op.outputs}
    is_apart = _repeats_fixed(op, tensors) or keeps_items_apart(op, tensors)
    is_size = op.op_type == "Shape" or (op.op_type in KNOWN_OPS and tensors.sizes.issuperset(free))
    is_fixed = op.op_type in _REPEATABLE and tensors.fixed.issuperset(free)
    if is_fixed or (is_size and all(map(tensors.is_same_for_one, names))):
        tensors.fixed.update(names)
    if is_size or is_fixed:
        tensors.sizes.update(names)
    if is_apart:
        tensors.items.update(names)
    return is_apart or is_size or is_fixed


def _is_fixed(tensor: Tensor, op: Op, tensors: KnownTensors) -> bool:
    return tensor.name in tensors.fixed or any(tensor.name == weight.name for weight in op.weights)


def _repeats_fixed(op: Op, tensors: KnownTensors) -> bool:
    """Return whether an op repeats the same constants for every item, as in the expansion of position ids."""
    if op.op_type != "Expand" or not _is_fixed(op.inputs[0], op, tensors):
        return False
    output, has_sizes = op.outputs[0], all(tensor.name in tensors.sizes for tensor in op.inputs[1:])
    return has_sizes and tensors.has_rows_of_items(output) and _is_alike_for_all(op.inputs[0], len(output.shape))


def _gathers_own_item(op: Op, tensors: KnownTensors) -> bool:
    """Return whether GatherND takes each row from the item of the row's index, as for attention masks."""
    data, index = op.inputs
    value = tensors.values.get(index.name)
    if data.name not in tensors.items or index.name not in tensors.sizes or op.attributes.get("batch_dims", 0) != 0:
        return False
    if value is None or value.ndim < 2 or {data.shape[:1], op.outputs[0].shape[:1]} != {(tensors.batch,)}:
        return False
    rows = np.arange(tensors.batch).reshape(-1, *(1,) * (value.ndim - 2))
    return value.shape[0] == tensors.batch and bool(np.all(value[..., 0] == rows))


def _gathers_own_rows(op: Op, tensors: KnownTensors) -> bool:
    """Return whether Gather takes the same of its own rows for each item, as for flattened attention masks."""
    data, index = op.inputs
    value, of_one = tensors.values.get(index.name), tensors.values_of_one.get(index.name)
    if data.name not in tensors.items or _axis(op, 0, len(data.shape)) != 0 or value is None or of_one is None:
        return False
    each, numbers = data.shape[0] // tensors.batch, np.asarray(of_one, np.int64)
    if value.ndim == 0 or numbers.shape[:1] != (1,) or not bool(np.all((numbers >= 0) & (numbers < each))):
        return False
    return np.array_equal(value, np.concatenate([numbers + each * place for place in range(tensors.batch)]))


def keeps_items_apart(op: Op, tensors: KnownTensors) -> bool:
    """Return whether an op keeps the items of its inputs apart in its outputs, as rows in the items' order."""
    items, sizes = tensors.items, tensors.sizes
    if op.op_type == "GatherND":
        return _gathers_own_item(op, tensors)
    if op.op_type == "Gather" and _gathers_own_rows(op, tensors):
        return True
    of_items = [tensor for tensor in op.inputs if tensor.name in items]
    rest = [tensor for tensor in op.inputs if tensor.name not in items]
    by_size = op.op_type in _RESHAPING or op.op_type in ("Expand", "Slice")
    is_fixed = all(_is_fixed(tensor, op, tensors) or (by_size and tensor.name in sizes) for tensor in rest)
    if not of_items or not is_fixed or not all(map(tensors.has_rows_of_items, (*of_items, *op.outputs))):
        return False
    first, rank = op.inputs[0], len(of_items[0].shape)
    if op.op_type in _ELEMENTWISE:
        return all(len(item.shape) == rank for item in of_items) and all(_is_alike_for_all(x, rank) for x in rest)
    if op.op_type in _BY_ITEM:
        # Normalisation over the batch mixes items, and a random mask changes with each run.
        trains = bool(op.attributes.get("training_mode")) or (op.op_type == "Dropout" and len(op.inputs) > 2)
        return of_items == [first] and not trains
    if op.op_type in _RESHAPING:
        return of_items == [first]
    if op.op_type in _QUANTISING:  # several scales may be a scale for each item
        return of_items == [first] and all(prod(tensor.shape) == 1 for tensor in rest)
    if op.op_type == "Resize":
        return of_items == [first] and op.attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize"
    if op.op_type in ("MatMulInteger", "QLinearMatMul"):  # several scales of the first factor may be one for each item
        factors = [tensor for tensor in rest if prod(tensor.shape) > 1]
        return of_items == [first] and rank >= 2 and len(factors) == 1 and len(factors[0].shape) == 2
    if op.op_type in ("MatMul", "Gemm"):
        return _multiplies_items_apart(op, of_items, rest)
    if op.op_type in ("Concat", "Split"):
        return _axis(op, 0, rank) > 0 and (op.op_type == "Split" or not rest)
    if of_items == [first] and op.op_type in ("Expand", "Pad", "Slice"):
        return _leaves_rows(op, tensors)
    return _works_on_other_axes(op, of_items, rank)


def _leaves_rows(op: Op, tensors: KnownTensors) -> bool:
    """Return whether an op that repeats, pads or slices leaves the rows unchanged."""
    first, output = op.inputs[0], op.outputs[0]
    if first.shape[0] != output.shape[0] or len(first.shape) != len(output.shape):
        return False
    if op.op_type == "Expand":
        return True
    more = op.inputs[1:]
    if op.op_type == "Pad":
        pads = _read_list(op, 1, "pads", tensors)
        # A further input is the padding value, a scalar, or the axes.
        scalar = all(tensor.shape == () for tensor in more[1:])
        return pads is not None and scalar and pads[0] == pads[len(pads) // 2] == 0
    if len(more) not in (3, 4) or not all(_is_fixed(tensor, op, tensors) for tensor in (more[0], *more[2:])):
        return False
    # The last input holds the steps, or the axes: an equal number of rows in non-negative steps means all rows.
    last = _read_list(op, len(more), "", tensors)
    return last is not None and min(last) >= 0


def _read_list(op: Op, position: int, name: str, tensors: KnownTensors) -> list[int] | None:
    """Return a list given as an input or, in older opsets, as an attribute; None where unknown."""
    if len(op.inputs) > position:
        value = tensors.values.get(op.inputs[position].name)
        return None if value is None or not value.size else [int(number) for number in value.ravel()]
    attribute = op.attributes.get(name)
    return list(attribute) if isinstance(attribute, tuple) and attribute else None


def _multiplies_items_apart(op: Op, of_items: Sequence[Tensor], rest: Sequence[Tensor]) -> bool:
    """Return whether the items are rows of the first factor, or the first of the batch dimensions of the product."""
    if op.op_type == "Gemm":
        transposed = bool(op.attributes.get("transA"))
        return of_items == [op.inputs[0]] and not transposed and all(_is_alike_for_all(x, 2) for x in op.inputs[2:])
    if len(of_items) == 2:
        return len(of_items[0].shape) == len(of_items[1].shape) >= 3
    return of_items == [op.inputs[0]] and len(of_items[0].shape) >= 2 and all(len(x.shape) <= 2 for x in rest)


def _works_on_other_axes(op: Op, of_items: Sequence[Tensor], rank: int) -> bool:
    """Return whether an op along one or several axes leaves the first axis unchanged."""
    if op.op_type in ("ArgMax", "ArgMin"):
        return of_items == [op.inputs[0]] and _axis(op, 0, rank) > 0
    if op.op_type in ("Softmax", "LogSoftmax", "Hardmax", "LayerNormalization", "RMSNormalization", "TopK"):
        return of_items == [op.inputs[0]] and rank >= 2 and _axis(op, -1, rank) > 0
    if op.op_type in _REDUCING:  # a reduction of the first dimension would fail the check of rows
        return of_items == [op.inputs[0]]
    if op.op_type == "Transpose":
        order = op.attributes.get("perm")
        return isinstance(order, tuple) and order[0] == 0
    if op.op_type == "Gather":
        by_items = len(of_items) == 1 and of_items[0] == op.inputs[-1] and _axis(op, 0, len(op.inputs[0].shape)) == 0
        return by_items or (of_items == [op.inputs[0]] and _axis(op, 0, rank) > 0)
    return False


def _is_alike_for_all(constant: Tensor, rank: int) -> bool:
    """Return whether a constant is broadcast equally to each item."""
    return len(constant.shape) < rank or (len(constant.shape) == rank and constant.shape[0] == 1)


def _axis(op: Op, default: int, rank: int) -> int:
    """Return the axis of an op, counted from the front."""
    axis = op.attributes.get("axis", default)
    return axis % max(1, rank) if isinstance(axis, int) else 0
