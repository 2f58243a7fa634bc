"""When an op over concatenated inputs gives the concatenation of what it would give alone, and along which axis.

For each op type a rule: the inputs are laid end to end along some axis, or are one shared value; the rule says along
which axis each output is then laid, or why the op mixes what lies along it. An op without a rule is not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import NodeProto

from gpuprof.merging.normal import attribute, whole
from gpuprof.merging.source import Array, Size


class UnmergeableError(Exception):
    """Why an op cannot be run once for several models; the message is part of the report."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One input of an op that is to run once for several models.

    Attributes
    ----------
    axis : int or None
        Along which the models' values are concatenated; None: all models share one value.
    dims : tuple of tuple of Size
        Of each model's value; equal but along ``axis``.
    value : ndarray or None
        Where it is a constant.
    """

    axis: int | None
    dims: tuple[tuple[Size, ...], ...]
    value: Array | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims[0])

    @property
    def sizes(self) -> tuple[Size, ...]:
        """How much of the axis belongs to each model."""
        return tuple(dims[self.axis] for dims in self.dims) if self.axis is not None else ()


Slots = Sequence[Slot | None]
Outputs = Sequence[tuple[tuple[Size, ...], ...]]
Axes = tuple[int | None, ...]
_Rule = Callable[[NodeProto, Slots, Outputs, int], Axes]


def output_axes(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    """Return for each output along which axis it is concatenated; None: shared.

    Parameters
    ----------
    node : NodeProto
    slots : sequence of Slot or None
        Its inputs; None where one is absent.
    outputs : sequence
        For each output, each model's dimensions.
    opset : int

    Raises
    ------
    UnmergeableError
        When the op mixes what belongs to different models, or nothing is known of it.
    """
    given = [slot for slot in slots if slot is not None]
    if not given or node.op_type.startswith("Random") or node.op_type in {"Bernoulli", "Multinomial"}:
        raise UnmergeableError(f"{node.op_type} has nothing to concatenate")
    if all(slot.axis is None for slot in given):
        return (None,) * len(node.output)
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None:
        raise UnmergeableError(f"{node.op_type} is not known to keep the parts of a batch apart")
    return rule(node, slots, outputs, opset)


def normal_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    return axis + rank if axis < 0 else axis


def _broadcast(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    given = [slot for slot in slots if slot is not None]
    laid = [slot for slot in given if slot.axis is not None]
    from_end = {slot.axis - slot.rank for slot in laid if slot.axis is not None}
    if len(from_end) != 1 or len({slot.sizes for slot in laid}) != 1:
        raise UnmergeableError(f"the inputs of {node.op_type} are concatenated along different axes")
    end = from_end.pop()
    for slot in given:
        if slot.axis is None and slot.rank >= -end and slot.dims[0][end] != Size(1):
            raise UnmergeableError(f"{node.op_type} adds a value to each part of the batch that all models share")
    return tuple(end + len(dims[0]) for dims in outputs)


def _matmul(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    a, b = _two(node, slots)
    out = len(outputs[0][0])
    if a.rank < 2 or b.rank < 2:
        raise UnmergeableError(f"{node.op_type} of a vector")
    if a.axis is not None and b.axis is not None:
        end = a.axis - a.rank
        if end != b.axis - b.rank or end >= -2 or a.sizes != b.sizes:
            raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
        return (end + out,)
    laid, shared = (a, b) if a.axis is not None else (b, a)
    end = (laid.axis or 0) - laid.rank
    free = -2 if laid is a else -1  # rows of the left factor, columns of the right one, may be any number
    if end == free:
        return (end + out,)
    if end >= -2 or (shared.rank >= -end and shared.dims[0][end] != Size(1)):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (end + out,)


def _integer_matmul(first: int, second: int, of_rows: tuple[int, ...]) -> _Rule:
    """Return the rule of products of whole numbers, whose factors, and scales for each row, stand at these inputs."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
        rest = [slot for i, slot in enumerate(slots) if slot is not None and i not in (first, second)]
        by_row = [slots[i] for i in of_rows if i < len(slots)]
        if any(slot.axis is not None for slot in rest):
            raise UnmergeableError(f"{node.op_type} takes its scale from each model")
        if any(slot is not None and slot.dims[0] not in ((), (Size(1),)) for slot in by_row):
            raise UnmergeableError(f"{node.op_type} has a scale for each part of the batch")
        return _matmul(node, [slots[first], slots[second]], outputs, opset)

    return rule


def _expand(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first, (_data, target) = _only_first(node, slots), _two(node, slots)
    if target.value is None:
        raise UnmergeableError("Expand names the size of its whole output")
    sizes, end = [int(size) for size in np.asarray(target.value).ravel()], (first.axis or 0) - first.rank
    if len(sizes) >= -end and sizes[end] != 1:
        raise UnmergeableError("Expand changes the batch")
    return (end + len(outputs[0][0]),)


def _einsum(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Concatenation along an index that is neither summed over nor in what models share runs through to the output."""
    equation = attribute(node, "equation")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    given, arrow, made = text.partition("->")
    terms = given.split(",")
    if "." in text or not arrow or len(terms) != len(slots):
        raise UnmergeableError("Einsum does not name every axis")
    pairs = [(term, slot) for term, slot in zip(terms, slots, strict=True) if slot is not None]
    index = {term[slot.axis] for term, slot in pairs if slot.axis is not None}
    sizes = {slot.sizes for _, slot in pairs if slot.axis is not None}
    label = min(index)
    shared = any(label in term for term, slot in pairs if slot.axis is None)
    if len(index) > 1 or len(sizes) > 1 or shared or any(term.count(label) > 1 for term in terms):
        raise UnmergeableError("the inputs of Einsum are concatenated along different indices")
    if label not in made:
        raise UnmergeableError("Einsum sums over what is concatenated")
    return (made.index(label),)


def _two(node: NodeProto, slots: Slots) -> tuple[Slot, Slot]:
    a, b = slots[0], slots[1]
    if a is None or b is None:
        raise UnmergeableError(f"{node.op_type} lacks an input")
    return a, b


def _gemm(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    a = slots[0]
    _only_first(node, slots)
    if a is None or a.axis != whole(node, "transA", 0):
        raise UnmergeableError("Gemm sums over what is concatenated")
    c = slots[2] if len(slots) > 2 else None
    if c is not None and c.rank == 2 and c.dims[0][0] != Size(1):
        raise UnmergeableError("Gemm adds a value to each part of the batch that all models share")
    return (0,)


def _only_first(node: NodeProto, slots: Slots) -> Slot:
    first = slots[0]
    if first is None or first.axis is None or any(slot is not None and slot.axis is not None for slot in slots[1:]):
        raise UnmergeableError(f"{node.op_type} takes something else than its data from each model")
    return first


def _by_sample(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Convolutions, pooling and normalisation of images: samples are the first axis."""
    if _only_first(node, slots).axis != 0 or len(node.output) > 1:
        raise UnmergeableError(f"{node.op_type} mixes what is concatenated")
    return (0,)


def _resize(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    sizes = slots[3] if len(slots) > 3 else None
    scales = slots[2] if len(slots) > 2 else None
    if sizes is not None or scales is None or scales.value is None or not scales.value.size:
        raise UnmergeableError("Resize names the size of its whole output")
    if np.asarray(scales.value).ravel()[0] != 1:
        raise UnmergeableError("Resize changes the batch")
    return _by_sample(node, slots, outputs, opset)


def _kept(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Ops that treat each element alone."""
    first = _only_first(node, slots)
    return (first.axis,) * len(node.output)


def _quantised(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    first, (_, scale) = _only_first(node, slots), _two(node, slots)
    if (
        scale.rank == 1
        and scale.dims[0] != (Size(1),)
        and normal_axis(whole(node, "axis", 1), first.rank) == first.axis
    ):
        raise UnmergeableError(f"{node.op_type} has a scale for each part of the batch")
    return _kept(node, slots, outputs, opset)


def _softmax(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    first = _only_first(node, slots)
    axis = normal_axis(whole(node, "axis", -1 if opset >= 13 else 1), first.rank)
    if first.axis == axis or (opset < 13 and (first.axis or 0) > axis):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (first.axis,)


def _from_axis(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Layer normalisation: everything from ``axis`` on is mixed."""
    first = _only_first(node, slots)
    if (first.axis or 0) >= normal_axis(whole(node, "axis", -1), first.rank):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (first.axis,) * len(node.output)


def _skip_norm(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    a, b = _two(node, slots)
    if a.axis is None or a.axis != b.axis or a.sizes != b.sizes or a.axis == a.rank - 1:
        raise UnmergeableError(f"{node.op_type} mixes what is concatenated")
    if any(slot is not None and slot.axis is not None for slot in slots[2:]):
        raise UnmergeableError(f"{node.op_type} takes its scale from each model")
    return (a.axis,) * len(node.output)


def _fused_attention(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = slots[0]
    rest = [slot for i, slot in enumerate(slots) if slot is not None and i not in (0, 3)]
    mask = slots[3] if len(slots) > 3 else None
    if first is None or first.axis != 0 or any(slot.axis is not None for slot in rest) or len(node.output) > 1:
        raise UnmergeableError("Attention takes more than its data and mask from each model")
    if mask is not None and mask.axis != 0:
        raise UnmergeableError("Attention has a mask that all models share")
    return (0,)


def _transpose(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = _only_first(node, slots)
    order = attribute(node, "perm") or list(range(first.rank))[::-1]
    return (list(order).index(first.axis),)  # type: ignore[call-overload]


def _reshape(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Everything before the axis must stay as many; then what follows it is laid end to end in memory."""
    first = _only_first(node, slots)
    before = _product(first.dims[0][: first.axis])
    for axis in range(len(outputs[0][0])):
        same_rest = len({dims[axis + 1 :] for dims in outputs[0]}) == 1
        if _product(outputs[0][0][:axis]) == before and same_rest:
            return (axis,)
    raise UnmergeableError(f"{node.op_type} folds the batch into another axis")


def _product(dims: Sequence[Size]) -> int | None:
    """Return the product of fixed sizes; None, which equals nothing, where one varies."""
    return prod(dim.fixed for dim in dims) if not any(dim.per_batch for dim in dims) else None


def _joined(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    laid = [slot for slot in slots if slot is not None]
    axes = {slot.axis for slot in laid}
    axis = normal_axis(whole(node, "axis", 0), laid[0].rank)
    if len(axes) != 1 or len({slot.sizes for slot in laid}) != 1 or axis in axes:
        raise UnmergeableError("Concat joins what models share with what they do not")
    return (axes.pop(),)


def _along(default: int) -> _Rule:
    """Return the rule of ops that work along one axis: Split, CumSum, TopK, ArgMax with their default axis."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
        first = _only_first(node, slots)
        second = slots[1] if len(slots) > 1 else None
        stated = whole(node, "axis", default)
        if node.op_type == "CumSum" and second is not None and second.value is not None:
            stated = int(np.asarray(second.value).ravel()[0])
        axis = normal_axis(stated, first.rank)
        if axis == first.axis:
            raise UnmergeableError(f"{node.op_type} works along the batch")
        gone = len(outputs[0][0]) < first.rank and axis < (first.axis or 0)
        return ((first.axis or 0) - gone,) * len(node.output)

    return rule


def _listed(node: NodeProto, slots: Slots, position: int, name: str) -> list[int] | None:
    """Return axes given as an attribute or as a constant input; None where none are given."""
    slot = slots[position] if len(slots) > position else None
    if slot is not None:
        if slot.value is None:
            raise UnmergeableError(f"{node.op_type} has axes known only at run time")
        return [int(axis) for axis in np.asarray(slot.value).ravel()]
    value = attribute(node, name)
    return [int(axis) for axis in value] if isinstance(value, list | tuple) else None


def _reduce(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = _only_first(node, slots)
    axes = _listed(node, slots, 1, "axes")
    if not axes and whole(node, "noop_with_empty_axes", 0):
        return (first.axis,)
    reduced = {normal_axis(axis, first.rank) for axis in axes or range(first.rank)}
    if first.axis in reduced:
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    lost = 0 if whole(node, "keepdims", 1) else sum(axis < (first.axis or 0) for axis in reduced)
    return ((first.axis or 0) - lost,)


def _squeeze(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = _only_first(node, slots)
    axes = _listed(node, slots, 1, "axes")
    if axes is None:
        raise UnmergeableError("Squeeze without axes would drop a batch of one")
    dropped = {normal_axis(axis, first.rank) for axis in axes}
    if first.axis in dropped:
        raise UnmergeableError("Squeeze drops the batch")
    return ((first.axis or 0) - sum(axis < (first.axis or 0) for axis in dropped),)


def _unsqueeze(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = _only_first(node, slots)
    rank = len(outputs[0][0])
    added = {normal_axis(axis, rank) for axis in _listed(node, slots, 1, "axes") or []}
    return ([axis for axis in range(rank) if axis not in added][first.axis or 0],)


def _slice(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = _only_first(node, slots)
    axes = _listed(node, slots, 3, "axes")
    if axes is None:
        starts = _listed(node, slots, 1, "starts") or []
        axes = list(range(len(starts)))
    if first.axis in {normal_axis(axis, first.rank) for axis in axes}:
        raise UnmergeableError("Slice cuts the batch")
    return (first.axis,)


def _gather(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    data, indices = _two(node, slots)
    axis = normal_axis(whole(node, "axis", 0), data.rank)
    if data.axis is None and indices.axis is not None:
        return (axis + indices.axis,)
    if data.axis is None or indices.axis is not None or data.axis == axis:
        raise UnmergeableError("Gather looks up in what is concatenated")
    return (data.axis if data.axis < axis else data.axis - 1 + indices.rank,)


def _neutral(position: int, neutral: int) -> _Rule:
    """Return the rule of Pad and Tile: nothing may be added along the batch."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
        first = _only_first(node, slots)
        amounts = _listed(node, slots, position, "pads") or []
        if (len(slots) > 3 and slots[3] is not None) or not amounts:
            raise UnmergeableError(f"{node.op_type} with axes of its own")
        along = [amount for i, amount in enumerate(amounts) if i % first.rank == first.axis]
        if any(amount != neutral for amount in along):
            raise UnmergeableError(f"{node.op_type} changes the batch")
        return (first.axis,)

    return rule


def _recurrent(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    if whole(node, "layout", 0) or (len(slots) > 4 and slots[4] is not None):
        raise UnmergeableError(f"{node.op_type} with lengths or its batch first")
    for i, slot in enumerate(slots):
        if slot is not None and slot.axis != (1 if i in (0, 5, 6) else None):
            raise UnmergeableError(f"{node.op_type} takes its weights or states from each model")
    return tuple(2 if len(dims[0]) == 4 else 1 for dims in outputs)


_ELEMENTWISE = (
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Where", "PRelu", "Sum", "Max", "Min", "Mean", "BitShift", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor",
)  # fmt: skip
_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish",
    "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round",
    "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh",
    "ThresholdedRelu",
)  # fmt: skip
_IMAGES = (
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "AveragePool", "MaxPool", "LpPool",
    "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "BatchNormalization", "InstanceNormalization",
    "GroupNormalization", "LRN", "DepthToSpace", "SpaceToDepth",
)  # fmt: skip
_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare",
)  # fmt: skip

_RULES: dict[tuple[str, str], _Rule] = {
    **{("", name): _broadcast for name in _ELEMENTWISE},
    **{("", name): _kept for name in _UNARY},
    **{("", name): _by_sample for name in _IMAGES},
    **{("", name): _reduce for name in _REDUCTIONS},
    **{("", name): _recurrent for name in ("LSTM", "GRU", "RNN")},
    **{("", name): _softmax for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{("", name): _from_axis for name in ("LayerNormalization", "RMSNormalization")},
    **{("", name): _quantised for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("", name): _along(0) for name in ("Split", "ArgMax", "ArgMin", "CumSum")},
    **{("", name): _reshape for name in ("Reshape", "Flatten")},
    ("", "TopK"): _along(-1),
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Resize"): _resize,
    ("", "Transpose"): _transpose,
    ("", "Concat"): _joined,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Slice"): _slice,
    ("", "Gather"): _gather,
    ("", "Pad"): _neutral(1, 0),
    ("", "Tile"): _neutral(1, 1),
    ("", "MatMulInteger"): _integer_matmul(0, 1, (2,)),
    ("", "QLinearMatMul"): _integer_matmul(0, 3, (1, 2, 6, 7)),
    ("", "Expand"): _expand,
    ("", "Einsum"): _einsum,
    ("com.microsoft", "Attention"): _fused_attention,
    ("com.microsoft", "BiasGelu"): _broadcast,
    ("com.microsoft", "FastGelu"): _broadcast,
    ("com.microsoft", "Gelu"): _kept,
    ("com.microsoft", "QuickGelu"): _kept,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
}
