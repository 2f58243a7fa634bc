"""Rules for running ops over concatenated inputs: the axis of concatenation of each output, per op type.

Each input is concatenated along an axis or shared by all models. The rule of the op type returns the axis along which
each output is the concatenation of the models' own outputs, or raises because the op mixes values along the input's
axis. Ops without a rule are not merged.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from gpuprof.merging.normalisation import whole
from gpuprof.merging.product_axes import (
    attention_axes,
    einsum_axes,
    gemm_axes,
    integer_matmul,
    matmul_axes,
    recurrent_axes,
)
from gpuprof.merging.shape_axes import (
    concat_axes,
    expand_axes,
    gather_axes,
    neutral_pads,
    reshape_axes,
    slice_axes,
    squeeze_axes,
    transpose_axes,
    unsqueeze_axes,
)
from gpuprof.merging.slots import (
    Axes,
    Outputs,
    Rule,
    Slots,
    UnmergeableError,
    first_two_inputs,
    listed_axes,
    normal_axis,
    only_data_input,
)
from gpuprof.merging.source import Size


def output_axes(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    """Return the axis of concatenation of each output; None: shared.

    Raises `UnmergeableError` when the op mixes values of different models, or has no rule. ``slots``: the inputs, None
    for an absent input; ``outputs``: for each output, each model's dimensions.
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


def _by_sample(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of convolutions, pooling and normalisation of images: samples are the first axis."""
    if only_data_input(node, slots).axis != 0 or len(node.output) > 1:
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


def _elementwise(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of elementwise ops of one input: the axis stays."""
    first = only_data_input(node, slots)
    return (first.axis,) * len(node.output)


def _quantise_axes(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    first, (_, scale) = only_data_input(node, slots), first_two_inputs(node, slots)
    if (
        scale.rank == 1
        and scale.dims[0] != (Size(1),)
        and normal_axis(whole(node, "axis", 1), first.rank) == first.axis
    ):
        raise UnmergeableError(f"{node.op_type} has a scale for each part of the batch")
    return _elementwise(node, slots, outputs, opset)


def _softmax(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
    first = only_data_input(node, slots)
    axis = normal_axis(whole(node, "axis", -1 if opset >= 13 else 1), first.rank)
    if first.axis == axis or (opset < 13 and (first.axis or 0) > axis):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (first.axis,)


def _from_axis(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of layer normalisation: all axes from ``axis`` on are mixed."""
    first = only_data_input(node, slots)
    if (first.axis or 0) >= normal_axis(whole(node, "axis", -1), first.rank):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (first.axis,) * len(node.output)


def _skip_norm(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    a, b = first_two_inputs(node, slots)
    if a.axis is None or a.axis != b.axis or a.sizes != b.sizes or a.axis == a.rank - 1:
        raise UnmergeableError(f"{node.op_type} mixes what is concatenated")
    if any(slot is not None and slot.axis is not None for slot in slots[2:]):
        raise UnmergeableError(f"{node.op_type} takes its scale from each model")
    return (a.axis,) * len(node.output)


def _along(default: int) -> Rule:
    """Return the rule of ops that work along a single axis (Split, CumSum, TopK, ArgMax), by default ``default``."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
        first = only_data_input(node, slots)
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


def _reduce(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    first = only_data_input(node, slots)
    axes = listed_axes(node, slots, 1, "axes")
    if not axes and whole(node, "noop_with_empty_axes", 0):
        return (first.axis,)
    reduced = {normal_axis(axis, first.rank) for axis in axes or range(first.rank)}
    if first.axis in reduced:
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    lost = 0 if whole(node, "keepdims", 1) else sum(axis < (first.axis or 0) for axis in reduced)
    return ((first.axis or 0) - lost,)


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
    **{("", name): _elementwise for name in _UNARY},
    **{("", name): _by_sample for name in _IMAGES},
    **{("", name): _reduce for name in _REDUCTIONS},
    **{("", name): recurrent_axes for name in ("LSTM", "GRU", "RNN")},
    **{("", name): _softmax for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{("", name): _from_axis for name in ("LayerNormalization", "RMSNormalization")},
    **{("", name): _quantise_axes for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("", name): _along(0) for name in ("Split", "ArgMax", "ArgMin", "CumSum")},
    **{("", name): reshape_axes for name in ("Reshape", "Flatten")},
    ("", "TopK"): _along(-1),
    ("", "MatMul"): matmul_axes,
    ("", "Gemm"): gemm_axes,
    ("", "Resize"): _resize,
    ("", "Transpose"): transpose_axes,
    ("", "Concat"): concat_axes,
    ("", "Squeeze"): squeeze_axes,
    ("", "Unsqueeze"): unsqueeze_axes,
    ("", "Slice"): slice_axes,
    ("", "Gather"): gather_axes,
    ("", "Pad"): neutral_pads(1, 0),
    ("", "Tile"): neutral_pads(1, 1),
    ("", "MatMulInteger"): integer_matmul(0, 1, (2,)),
    ("", "QLinearMatMul"): integer_matmul(0, 3, (1, 2, 6, 7)),
    ("", "Expand"): expand_axes,
    ("", "Einsum"): einsum_axes,
    ("com.microsoft", "Attention"): attention_axes,
    **{("com.microsoft", name): _broadcast for name in ("BiasGelu", "FastGelu")},
    **{("com.microsoft", name): _elementwise for name in ("Gelu", "QuickGelu")},
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
}
