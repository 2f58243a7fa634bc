"""Rules by op type: whether an op may run once over the concatenated batches of several models.

Each input is concatenated along its first axis, or shared by all models. An op may run once if each of its outputs is
then the concatenation of the models' own outputs along the first axis. The rule of its type raises if the op mixes
values along that axis, or moves it. Ops without a rule are not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from gpuprof.merging.normalisation import attribute, whole
from gpuprof.merging.source import Array, Size


class UnmergeableError(Exception):
    """Raised when an op cannot run once for several models; the message, the reason, is part of the report."""


@dataclass(frozen=True, slots=True)
class OpInput:
    """An input of an op that runs once for several models."""

    is_concatenated: bool  #: Whether the models' values are concatenated; else all models share a value.
    dims: tuple[tuple[Size, ...], ...]  #: Dimensions of each model's value; equal except for the first.
    value: Array | None = None  #: Value of a constant.

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims[0])

    def spans_batch(self, rank: int) -> bool:
        """Return whether a value shared by all models has entries for the parts of a batch of ``rank`` dimensions."""
        return self.rank >= rank and self.dims[0][self.rank - rank] != Size(1)


Inputs = Sequence[OpInput | None]
Rule = Callable[[NodeProto, Inputs, int], bool]


def concatenates(node: NodeProto, inputs: Inputs, opset: int) -> bool:
    """Return whether the outputs are concatenated; otherwise all models share them.

    Raises `UnmergeableError` when the op mixes values of different models, or has no rule. ``inputs``: None for an
    absent input.
    """
    given = [one for one in inputs if one is not None]
    if not given or node.op_type.startswith("Random") or node.op_type in {"Bernoulli", "Multinomial"}:
        raise UnmergeableError(f"{node.op_type} has nothing to concatenate")
    if not any(one.is_concatenated for one in given):
        return False
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None:
        raise UnmergeableError(f"{node.op_type} is not known to keep the parts of a batch apart")
    if not rule(node, inputs, opset):
        raise UnmergeableError(f"{node.op_type} mixes the parts of a batch, or models with what they share")
    return True


def _takes_data(inputs: Inputs, *positions: int) -> bool:
    """Return whether the inputs at these positions, by default the first, are concatenated, and no others."""
    chosen = positions or (0,)
    return all(one is None or one.is_concatenated == (i in chosen) for i, one in enumerate(inputs))


def _input(inputs: Inputs, position: int) -> OpInput | None:
    return inputs[position] if len(inputs) > position else None


def _axis(node: NodeProto, inputs: Inputs, default: int) -> int:
    """Return the attribute ``axis``, counted from the front of the first input."""
    first, axis = inputs[0], whole(node, "axis", default)
    return axis + first.rank if axis < 0 and first is not None else axis


def _axes(node: NodeProto, inputs: Inputs, position: int, name: str, rank: int) -> list[int] | None:
    """Return axes given as an attribute or as a constant input, counted from the front; None if not given."""
    listed = _input(inputs, position)
    value = attribute(node, name) if listed is None else listed.value
    if listed is not None and value is None:
        raise UnmergeableError(f"{node.op_type} has axes known only at run time")
    if value is None:
        return None
    return [int(axis) + rank if axis < 0 else int(axis) for axis in np.asarray(value).ravel()]


def _unary(node: NodeProto, inputs: Inputs, _: int) -> bool:
    return _takes_data(inputs)


def _broadcast(node: NodeProto, inputs: Inputs, _: int) -> bool:
    given = [one for one in inputs if one is not None]
    laid = [one for one in given if one.is_concatenated]
    rank = max(one.rank for one in given)
    alike = len({tuple(dims[0] for dims in one.dims) for one in laid}) == 1
    return (
        alike
        and all(one.rank == rank for one in laid)
        and not any(one.spans_batch(rank) for one in given if not one.is_concatenated)
    )


def _by_sample(node: NodeProto, inputs: Inputs, _: int) -> bool:
    return _takes_data(inputs) and len(node.output) == 1


def _resize(node: NodeProto, inputs: Inputs, _: int) -> bool:
    scales = _input(inputs, 2)
    if _input(inputs, 3) is not None or scales is None or scales.value is None or not scales.value.size:
        raise UnmergeableError("Resize names the size of its whole output")
    return _takes_data(inputs) and np.asarray(scales.value).ravel()[0] == 1


def _quantise(node: NodeProto, inputs: Inputs, _: int) -> bool:
    scale = inputs[1]
    by_part = scale is not None and scale.rank == 1 and scale.dims[0] != (Size(1),) and _axis(node, inputs, 1) == 0
    return _takes_data(inputs) and not by_part


def _along(default: int) -> Rule:
    """Return the rule of ops that work along a single axis, by default ``default``."""

    def rule(node: NodeProto, inputs: Inputs, _: int) -> bool:
        return _takes_data(inputs) and _axis(node, inputs, default) != 0

    return rule


def _cumulate(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first, axis = inputs[0], _input(inputs, 1)
    if first is None or axis is None or axis.value is None:
        return False
    return _takes_data(inputs) and int(np.asarray(axis.value).ravel()[0]) % first.rank != 0


def _softmax(node: NodeProto, inputs: Inputs, opset: int) -> bool:
    return _takes_data(inputs) and _axis(node, inputs, -1 if opset >= 13 else 1) != 0


def _reduce(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first = inputs[0]
    axes = _axes(node, inputs, 1, "axes", first.rank) if first is not None else None
    return _takes_data(inputs) and (0 not in axes if axes else bool(whole(node, "noop_with_empty_axes", 0)))


def _squeeze(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first = inputs[0]
    axes = _axes(node, inputs, 1, "axes", first.rank) if first is not None else None
    return _takes_data(inputs) and axes is not None and 0 not in axes


def _unsqueeze(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first = inputs[0]
    added = _axes(node, inputs, 1, "axes", 0) or []
    rank = len(added) + (first.rank if first is not None else 0)
    return _takes_data(inputs) and not {0, -rank} & set(added)


def _slice(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first = inputs[0]
    rank = first.rank if first is not None else 0
    axes = _axes(node, inputs, 3, "axes", rank)
    starts = _axes(node, inputs, 1, "starts", 0) or []
    return _takes_data(inputs) and 0 not in (range(len(starts)) if axes is None else axes)


def _transpose(node: NodeProto, inputs: Inputs, _: int) -> bool:
    order = attribute(node, "perm")
    return _takes_data(inputs) and isinstance(order, list | tuple) and order[0] == 0


def _gather(node: NodeProto, inputs: Inputs, _: int) -> bool:
    from_table = _takes_data(inputs, 1) and _axis(node, inputs, 0) == 0
    return from_table or (_takes_data(inputs) and _axis(node, inputs, 0) != 0)


def _concat(node: NodeProto, inputs: Inputs, _: int) -> bool:
    return _takes_data(inputs, *range(len(inputs))) and _axis(node, inputs, 0) != 0


def _amounts(position: int, neutral: int) -> Rule:
    """Return the rule of Pad and Tile: the amount along the batch must be ``neutral``."""

    def rule(node: NodeProto, inputs: Inputs, _: int) -> bool:
        first, amounts = inputs[0], _axes(node, inputs, position, "pads", 0)
        if first is None or not amounts or _input(inputs, 3) is not None:
            return False
        return _takes_data(inputs) and all(amount == neutral for amount in amounts[:: first.rank])

    return rule


def _expand(node: NodeProto, inputs: Inputs, _: int) -> bool:
    first, target = inputs[0], inputs[1]
    if first is None or target is None or target.value is None:
        raise UnmergeableError("Expand names the size of its whole output")
    sizes = np.asarray(target.value).ravel()
    return _takes_data(inputs) and (len(sizes) < first.rank or (len(sizes) == first.rank and sizes[0] == 1))


def _matmul(node: NodeProto, inputs: Inputs, _: int) -> bool:
    a, b = inputs[0], inputs[1]
    if a is None or b is None or a.rank < 2 or b.rank < 2:
        return False
    if a.is_concatenated and b.is_concatenated:  # the batch must be an axis before rows and columns in both
        return a.rank == b.rank > 2 and all(x[0] == y[0] for x, y in zip(a.dims, b.dims, strict=True))
    laid, shared = (a, b) if a.is_concatenated else (b, a)
    if laid is a and laid.rank == 2:
        return shared.rank == 2
    return laid.rank > 2 and shared.rank <= laid.rank and not shared.spans_batch(laid.rank)


def _integer_matmul(first: int, second: int, scales: tuple[int, ...]) -> Rule:
    """Return the rule of integer products; ``scales``: inputs that may have an entry for each row."""

    def rule(node: NodeProto, inputs: Inputs, opset: int) -> bool:
        by_row = [_input(inputs, i) for i in scales]
        single = all(one is None or one.dims[0] in ((), (Size(1),)) for one in by_row)
        rest = [one for i, one in enumerate(inputs) if i not in (first, second)]
        return single and _takes_data([None, *rest]) and _matmul(node, [inputs[first], inputs[second]], opset)

    return rule


def _gemm(node: NodeProto, inputs: Inputs, _: int) -> bool:
    added = _input(inputs, 2)
    return _takes_data(inputs) and not whole(node, "transA", 0) and (added is None or not added.spans_batch(2))


def _einsum(node: NodeProto, inputs: Inputs, _: int) -> bool:
    equation = attribute(node, "equation")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    given, _arrow, result = text.partition("->")
    terms = given.split(",")
    if "." in text or not result or len(terms) != len(inputs):
        return False
    label = result[0]
    return all(
        one is None or (term[0] == label and term.count(label) == 1 if one.is_concatenated else label not in term)
        for term, one in zip(terms, inputs, strict=True)
    )


def _attention(node: NodeProto, inputs: Inputs, _: int) -> bool:
    return _takes_data(inputs, 0, 3) and len(node.output) == 1


def _skip_norm(node: NodeProto, inputs: Inputs, _: int) -> bool:
    a, b = inputs[0], inputs[1]
    return _takes_data(inputs, 0, 1) and a is not None and b is not None and a.rank == b.rank > 1


def _flat(node: NodeProto, inputs: Inputs, _: int) -> bool:
    """Apply the rule of Reshape: the values of a batch follow one another in memory, before and after."""
    return _takes_data(inputs)


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

_RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _broadcast for name in _ELEMENTWISE},
    **{("", name): _unary for name in _UNARY},
    **{("", name): _by_sample for name in _IMAGES},
    **{("", name): _reduce for name in _REDUCTIONS},
    **{("", name): _softmax for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{("", name): _along(-1) for name in ("LayerNormalization", "RMSNormalization", "TopK")},
    **{("", name): _along(0) for name in ("Split", "ArgMax", "ArgMin")},
    **{("", name): _quantise for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("", name): _flat for name in ("Reshape", "Flatten")},
    ("", "CumSum"): _cumulate,
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Resize"): _resize,
    ("", "Transpose"): _transpose,
    ("", "Concat"): _concat,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Slice"): _slice,
    ("", "Gather"): _gather,
    ("", "Pad"): _amounts(1, 0),
    ("", "Tile"): _amounts(1, 1),
    ("", "MatMulInteger"): _integer_matmul(0, 1, (2,)),
    ("", "QLinearMatMul"): _integer_matmul(0, 3, (1, 2, 6, 7)),
    ("", "Expand"): _expand,
    ("", "Einsum"): _einsum,
    ("com.microsoft", "Attention"): _attention,
    **{("com.microsoft", name): _broadcast for name in ("BiasGelu", "FastGelu")},
    **{("com.microsoft", name): _unary for name in ("Gelu", "QuickGelu")},
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
}
