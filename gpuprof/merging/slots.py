"""The inputs of a mergeable op, and the checks shared by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import NodeProto

from gpuprof.merging.normalisation import attribute
from gpuprof.merging.source import Array, Size


class UnmergeableError(Exception):
    """Raised when an op cannot run once for several models; the message, the reason, is part of the report."""


@dataclass(frozen=True, slots=True)
class OpInput:
    """An input of an op that runs once for several models."""

    axis: int | None  #: Axis along which the models' values are concatenated; None: all models share a value.
    dims: tuple[tuple[Size, ...], ...]  #: Dimensions of each model's value; equal except along ``axis``.
    value: Array | None = None  #: Value of a constant.

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims[0])

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Size of each model's part along the axis; empty if shared."""
        return tuple(dims[self.axis] for dims in self.dims) if self.axis is not None else ()


Slots = Sequence[OpInput | None]
Outputs = Sequence[tuple[tuple[Size, ...], ...]]
Axes = tuple[int | None, ...]
Rule = Callable[[NodeProto, Slots, Outputs, int], Axes]


def normal_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    return axis + rank if axis < 0 else axis


def first_two_inputs(node: NodeProto, slots: Slots) -> tuple[OpInput, OpInput]:
    """Return the first two inputs of a node; raise `UnmergeableError` if one is absent."""
    a, b = slots[0], slots[1]
    if a is None or b is None:
        raise UnmergeableError(f"{node.op_type} lacks an input")
    return a, b


def only_data_input(node: NodeProto, slots: Slots) -> OpInput:
    """Return the first input; raise `UnmergeableError` unless this input alone is concatenated."""
    first = slots[0]
    if first is None or first.axis is None or any(slot is not None and slot.axis is not None for slot in slots[1:]):
        raise UnmergeableError(f"{node.op_type} takes something else than its data from each model")
    return first


def listed_axes(node: NodeProto, slots: Slots, position: int, name: str) -> list[int] | None:
    """Return axes given as an attribute or as a constant input; None if not given."""
    slot = slots[position] if len(slots) > position else None
    if slot is not None:
        if slot.value is None:
            raise UnmergeableError(f"{node.op_type} has axes known only at run time")
        return [int(axis) for axis in np.asarray(slot.value).ravel()]
    value = attribute(node, name)
    return [int(axis) for axis in value] if isinstance(value, list | tuple) else None


def fixed_product(dims: Sequence[Size]) -> int | None:
    """Return the product of fixed sizes; None if a size varies with the batch."""
    return prod(dim.fixed for dim in dims) if not any(dim.per_batch for dim in dims) else None
