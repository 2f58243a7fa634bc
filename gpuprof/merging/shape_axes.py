"""Rules of ops that rearrange, cut or join values; see `gpuprof.merging.axes`."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from gpuprof.merging.normalisation import attribute, whole
from gpuprof.merging.slots import (
    Axes,
    Outputs,
    Rule,
    Slots,
    UnmergeableError,
    first_two_inputs,
    fixed_product,
    listed_axes,
    normal_axis,
    only_data_input,
)


def expand_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Expand: the target must be 1 along the batch."""
    first, (_data, target) = only_data_input(node, slots), first_two_inputs(node, slots)
    if target.value is None:
        raise UnmergeableError("Expand names the size of its whole output")
    sizes, end = [int(size) for size in np.asarray(target.value).ravel()], (first.axis or 0) - first.rank
    if len(sizes) >= -end and sizes[end] != 1:
        raise UnmergeableError("Expand changes the batch")
    return (end + len(outputs[0][0]),)


def transpose_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Transpose: the axis moves with the permutation."""
    first = only_data_input(node, slots)
    order = attribute(node, "perm") or list(range(first.rank))[::-1]
    return (list(order).index(first.axis),)  # type: ignore[call-overload]


def reshape_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Reshape and Flatten: the product of sizes before the axis must stay the same.

    Then the entries that follow the axis are contiguous in memory.
    """
    first = only_data_input(node, slots)
    before = fixed_product(first.dims[0][: first.axis])
    for axis in range(len(outputs[0][0])):
        same_rest = len({dims[axis + 1 :] for dims in outputs[0]}) == 1
        if fixed_product(outputs[0][0][:axis]) == before and same_rest:
            return (axis,)
    raise UnmergeableError(f"{node.op_type} folds the batch into another axis")


def concat_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Concat: along another axis, of inputs concatenated alike."""
    stacked = [slot for slot in slots if slot is not None]
    axes = {slot.axis for slot in stacked}
    axis = normal_axis(whole(node, "axis", 0), stacked[0].rank)
    if len(axes) != 1 or len({slot.sizes for slot in stacked}) != 1 or axis in axes:
        raise UnmergeableError("Concat joins what models share with what they do not")
    return (axes.pop(),)


def squeeze_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Squeeze: the axis moves up by the number of axes dropped before it."""
    first = only_data_input(node, slots)
    axes = listed_axes(node, slots, 1, "axes")
    if axes is None:
        raise UnmergeableError("Squeeze without axes would drop a batch of one")
    dropped = {normal_axis(axis, first.rank) for axis in axes}
    if first.axis in dropped:
        raise UnmergeableError("Squeeze drops the batch")
    return ((first.axis or 0) - sum(axis < (first.axis or 0) for axis in dropped),)


def unsqueeze_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Unsqueeze: the axis moves down by the number of axes added before it."""
    first = only_data_input(node, slots)
    rank = len(outputs[0][0])
    added = {normal_axis(axis, rank) for axis in listed_axes(node, slots, 1, "axes") or []}
    return ([axis for axis in range(rank) if axis not in added][first.axis or 0],)


def slice_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Slice: along other axes only."""
    first = only_data_input(node, slots)
    axes = listed_axes(node, slots, 3, "axes")
    if axes is None:
        starts = listed_axes(node, slots, 1, "starts") or []
        axes = list(range(len(starts)))
    if first.axis in {normal_axis(axis, first.rank) for axis in axes}:
        raise UnmergeableError("Slice cuts the batch")
    return (first.axis,)


def gather_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Gather: from a shared table, or along another axis."""
    data, indices = first_two_inputs(node, slots)
    axis = normal_axis(whole(node, "axis", 0), data.rank)
    if data.axis is None and indices.axis is not None:
        return (axis + indices.axis,)
    if data.axis is None or indices.axis is not None or data.axis == axis:
        raise UnmergeableError("Gather looks up in what is concatenated")
    return (data.axis if data.axis < axis else data.axis - 1 + indices.rank,)


def neutral_pads(position: int, neutral: int) -> Rule:
    """Return the rule of Pad and Tile: the amount along the batch must be ``neutral``."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
        first = only_data_input(node, slots)
        amounts = listed_axes(node, slots, position, "pads") or []
        if (len(slots) > 3 and slots[3] is not None) or not amounts:
            raise UnmergeableError(f"{node.op_type} with axes of its own")
        along = [amount for i, amount in enumerate(amounts) if i % first.rank == first.axis]
        if any(amount != neutral for amount in along):
            raise UnmergeableError(f"{node.op_type} changes the batch")
        return (first.axis,)

    return rule
