"""Proof from an op's type and shapes that it computes the items of a batch independently.

The proof is conservative: the op must be listed below, with the batch, or an equal number of rows for each item, as its
first dimension, both at batch 1 and at another batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gpuprof.domain.model import Op, Tensor
from gpuprof.errors import InputError
from gpuprof.graph.load import load_graph, load_nodes
from gpuprof.graph.nodes import Array

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


#: Batch with which a model's shapes at batch 1 are compared.
_BATCH = 2


@dataclass(frozen=True, slots=True)
class BatchedTensors:
    """Tensors of an op at a batch above 1, by their names."""

    batch: int
    values: Mapping[str, Array]  #: Small constants.
    shapes_of_one: Mapping[str, tuple[int, ...]]  #: Shapes of all tensors at batch 1.
    items: set[str]  #: Tensors with the rows of each item in order, each row depending on its item alone.

    def has_rows_of_items(self, tensor: Tensor) -> bool:
        """Return whether the first dimension is the batch times that of an item, and all others are equal."""
        of_one = self.shapes_of_one.get(tensor.name, ())
        return bool(of_one) and tensor.shape == (self.batch * of_one[0], *of_one[1:])


def are_items_apart(path: Path) -> bool:
    """Return whether every output of a file provably has a row for each item, computed from that item alone."""
    try:
        single, batched = load_graph(path, 1), load_graph(path, _BATCH)
        values = load_nodes(path, _BATCH)[1]
    except InputError:  # a fixed batch, or unknown shapes
        return False
    shapes = {tensor.name: tensor.shape for op in single.ops for tensor in (*op.inputs, *op.outputs)}
    if batched.remarks or batched.unread:  # a runtime may know less of the outputs
        return False
    tensors = BatchedTensors(_BATCH, values, shapes, {tensor.name for tensor in batched.inputs})
    for op in batched.ops:
        if op.domain or not keeps_items_apart(op, tensors):
            return False
        tensors.items.update(tensor.name for tensor in op.outputs)
    rows = (*batched.inputs, *batched.outputs)
    return all(
        tensor.name in tensors.items and tensor.shape[:1] == (_BATCH,) and shapes.get(tensor.name, ())[:1] == (1,)
        for tensor in rows
    )


def keeps_items_apart(op: Op, tensors: BatchedTensors) -> bool:
    """Return whether an op keeps the items of its inputs apart in its outputs, as rows in the items' order."""
    of_items = [tensor for tensor in op.inputs if tensor.name in tensors.items]
    rest = [tensor for tensor in op.inputs if tensor.name not in tensors.items]
    constants = {weight.name for weight in op.weights}
    if not of_items or any(tensor.name not in constants for tensor in rest):
        return False
    if not all(map(tensors.has_rows_of_items, (*of_items, *op.outputs))):
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


def _leaves_rows(op: Op, tensors: BatchedTensors) -> bool:
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
    if len(more) not in (3, 4):
        return False
    # The last input holds the steps, or the axes: an equal number of rows in non-negative steps means all rows.
    last = _read_list(op, len(more), "", tensors)
    return last is not None and min(last) >= 0


def _read_list(op: Op, position: int, name: str, tensors: BatchedTensors) -> list[int] | None:
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
