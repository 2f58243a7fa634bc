"""The configurations of a device, and the contents of its partitions: instances, or the whole device.

A replica in a partition takes a share of it and, where memory binds, some of its memory: a slot is both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuprof.domain.device import Device
from gpuprof.domain.mig import Layout, distinct_layouts
from gpuprof.domain.share import Share

#: Maximum number of listed patterns of a partition; beyond, patterns are generated during the solution.
MOST_PACKINGS = 2_000
#: Maximum number of patterns among which the maximal patterns are found.
_MOST_LOOKED_AT = 10 * MOST_PACKINGS
#: Shares are counted in thousandths of a percent, rounded down: a third three times over fits a whole.
_PER_PERCENT = 1_000
#: A whole partition in the units of shares.
SPACE = 100 * _PER_PERCENT

#: A partition shared by percentage: a device and a MIG profile, None for the device as a whole.
PartitionKind = tuple[str, str | None]
Integers = npt.NDArray[np.int64]
#: Maximum cells of shares times memory for pricing.
_MOST_CELLS = SPACE // 4


@dataclass(frozen=True, slots=True)
class DeviceConfiguration:
    """A configuration of a device."""

    device: str
    layout: Layout = ()  #: Positions of the instances; empty where the device is shared whole.

    def partitions(self) -> Counter[PartitionKind]:
        """Return the number of partitions of each kind."""
        return Counter((self.device, item.profile.name) for item in self.layout) or Counter([(self.device, None)])


@dataclass(frozen=True, slots=True, order=True)
class PartitionSlot:
    """The place of a replica in a partition."""

    share: Share
    memory: int = 0  #: Memory in units of the partition's `MemoryGrid`; 0 where memory is not counted.


@dataclass(frozen=True, slots=True)
class SharePattern:
    """Slots that one partition holds together."""

    kind: PartitionKind
    slots: tuple[tuple[PartitionSlot, int], ...]  #: Slots with their multiplicities.


def list_configurations(device: Device, shares: Collection[Share]) -> tuple[DeviceConfiguration, ...]:
    """Return the configurations of ``device`` for these shares: whole, and each different maximal layout."""
    names = {share.mig for share in shares if share.mig is not None}
    profiles = tuple(profile for profile in device.mig_profiles if profile.name in names)
    undivided = [DeviceConfiguration(device.name)] if any(share.mig is None for share in shares) else []
    # Maximal layouts suffice: an empty instance costs nothing.
    layouts = distinct_layouts(device, profiles) if profiles else ()
    return (*undivided, *(DeviceConfiguration(device.name, layout) for layout in layouts))


@dataclass(frozen=True, slots=True)
class PatternPacker:
    """Finds the patterns of a partition."""

    kind: PartitionKind
    slots: tuple[PartitionSlot, ...]  #: Slots that may stand there.
    memory: int = 0  #: Memory of the partition, in the slots' units.

    def list_maximal(self) -> tuple[SharePattern, ...] | None:
        """Return every maximal pattern, to which no slot can be added; None when there are too many to list."""
        by_size = {(share_units(slot.share), slot.memory): slot for slot in self.slots}
        sizes = sorted(by_size, reverse=True)
        if not sizes:
            return ()
        if not self.memory and multisets([units for units, _ in sizes], SPACE) > _MOST_LOOKED_AT:
            return None
        packings = _list_packings(sizes, SPACE, self.memory)
        if packings is None:
            return None
        slots = [by_size[size] for size in sizes]
        return tuple(
            SharePattern(self.kind, tuple((slot, n) for slot, n in zip(slots, counts, strict=True) if n))
            for counts in packings.tolist()
        )

    def initial_patterns(self) -> tuple[SharePattern, ...]:
        """Return initial patterns: each slot a few times or as often as it fits, filled up with large slots."""
        order = sorted(self.slots, key=lambda slot: (share_units(slot.share), slot.memory), reverse=True)
        patterns = []
        for slot in order:
            most = _most_times(slot, SPACE, self.memory)
            for times in range(1, most + 1) if most < len(order) else {min(most, 1), most} - {0}:
                patterns.append(self._fill_with(slot, times, order))
        return tuple(dict.fromkeys(patterns))

    def best_pattern(self, values: Mapping[PartitionSlot, float]) -> tuple[SharePattern, float]:
        """Return the pattern of the highest total worth, and its worth."""
        order = sorted(self.slots, key=lambda slot: (share_units(slot.share), slot.memory))
        slot_values = [values.get(slot, 0.0) for slot in order]
        sizes, memories = [share_units(slot.share) for slot in order], [slot.memory for slot in order]
        counts, value = best_packing(sizes, slot_values, SPACE, memories, self.memory)
        return SharePattern(self.kind, tuple((slot, n) for slot, n in zip(order, counts, strict=True) if n)), value

    def _fill_with(self, main: PartitionSlot, times: int, slots: Sequence[PartitionSlot]) -> SharePattern:
        counts = Counter({main: times})
        space, memory = SPACE - times * share_units(main.share), self.memory - times * main.memory
        for slot in slots:
            count = 0 if slot == main else _most_times(slot, space, memory)
            if count:
                counts[slot] += count
                space -= count * share_units(slot.share)
                memory -= count * slot.memory
        return SharePattern(self.kind, tuple(counts.items()))


def share_units(share: Share) -> int:
    """Return a percentage in units, of which a partition has `SPACE`."""
    return max(1, math.floor(share.sm_pct * _PER_PERCENT + 1e-6))


def _most_times(slot: PartitionSlot, space: int, memory: int) -> int:
    """Return the number of copies of a slot that fit into the remaining space and memory."""
    most = space // share_units(slot.share)
    return min(most, memory // slot.memory) if slot.memory else most


def _list_packings(sizes: Sequence[tuple[int, int]], space: int, memory: int) -> Integers | None:
    """Return the maximal packings of a partition, those with most of the first size first.

    None where there are more than `MOST_PACKINGS`, or too many packings to look at.

    Parameters
    ----------
    sizes : sequence of (int, int), length n
        Space and memory of each size; no memory where memory is not counted.
    space, memory : int
        Of the partition.

    Returns
    -------
    ndarray of shape (m, n)
        Multiplicity of each size, a packing a row.
    """
    counts = np.zeros((1, 0), dtype=np.int64)
    left = np.array([[space, memory]])
    for place, (units, weight) in enumerate(sizes):
        most = left[:, 0] // units
        if weight:
            most = np.minimum(most, left[:, 1] // weight)
        if place < len(sizes) - 1:  # all that fit of the last size are taken: fewer are never maximal
            if (most + 1).sum() > _MOST_LOOKED_AT:
                return None
            rows = np.repeat(np.arange(len(most)), most + 1)
            most = np.repeat(np.cumsum(most + 1), most + 1) - np.arange(len(rows)) - 1
            counts, left = counts[rows], left[rows]
        counts, left = np.column_stack([counts, most]), left - most[:, None] * (units, weight)
    full = ~np.any([(left >= size).all(axis=1) for size in sizes], axis=0)
    return counts[full] if full.sum() <= MOST_PACKINGS else None


@dataclass(frozen=True, slots=True)
class MemoryGrid:
    """Unit in which bytes of memory are counted, for one kind of partition."""

    unit: int = 0  #: Bytes; 0 where memory does not bind and is not counted.
    capacity: int = 0  #: Units the partition holds.
    #: Round the memory of replicas down, which gives bounds; else up, which gives feasible packings.
    relaxed: bool = False

    @property
    def is_exact(self) -> bool:
        """Return whether memory is counted in bytes, so that nothing is rounded."""
        return self.unit <= 1

    def count(self, memory_bytes: int | None) -> int:
        """Return the number of units for ``memory_bytes``; unknown memory takes none."""
        if not self.unit or not memory_bytes:
            return 0
        return memory_bytes // self.unit if self.relaxed else -(-memory_bytes // self.unit)


def is_binding(units: Sequence[int], memory_bytes: Sequence[int], space: int, capacity_bytes: int) -> bool:
    """Return whether replicas whose shares fit together may exceed the memory.

    Parameters
    ----------
    units : sequence of int
        The share of each, as a part of ``space``.
    memory_bytes : sequence of int
        The memory of each.
    space, capacity_bytes : int
        Of the partition.
    """
    _, most = best_packing(units, [float(size) for size in memory_bytes], space)
    return most > capacity_bytes


def make_grid(capacity_bytes: int, space: int, *, relaxed: bool) -> MemoryGrid:
    """Return a grid coarse enough for pricing over ``space`` parts of a share."""
    steps = max(2, _MOST_CELLS // max(1, space))
    unit = math.ceil(capacity_bytes / steps)
    return MemoryGrid(unit, capacity_bytes // unit, relaxed)


def best_packing(
    sizes: Sequence[int],
    values: Sequence[float],
    capacity: int,
    weights: Sequence[int] | None = None,
    most_weight: int = 0,
) -> tuple[tuple[int, ...], float]:
    """Return the multiplicity of each size in a packing of the greatest value, and the value.

    Exact, by dynamic programming over the capacity and the weight. Taking a size n times is split into taking it 1, 2,
    4, … times at once, so that each step is a single array operation.

    Parameters
    ----------
    sizes : sequence of int, length n
        Above zero.
    values : sequence of float, length n
        Sizes of value zero or less are never taken.
    weights : sequence of int, length n, optional
        A second size, whose sum in a packing is at most ``most_weight``.
    """
    # The largest common unit of all sizes gives the smallest tables and the same answer.
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    best = np.zeros((space + 1, most_weight + 1))
    steps: list[tuple[int, int, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]] = []
    item_weights = [0] * len(sizes) if weights is None else weights
    for index, (size, value) in enumerate(zip(sizes, values, strict=True)):
        width, height, times = size // unit, item_weights[index], 1
        while value > 0.0 and times * width <= space and times * height <= most_weight:
            space_offset, weight_offset = times * width, times * height
            improved = np.zeros(best.shape, dtype=bool)
            candidate = best[: space + 1 - space_offset, : most_weight + 1 - weight_offset] + times * value
            improved[space_offset:, weight_offset:] = candidate > best[space_offset:, weight_offset:]
            best[space_offset:, weight_offset:] = np.maximum(best[space_offset:, weight_offset:], candidate)
            steps.append((index, times, improved))
            times *= 2
    counts, free, light = [0] * len(sizes), space, most_weight
    # Backwards: whether a step was taken depends on the space left by the steps before it.
    for index, times, improved in reversed(steps):
        if improved[free, light]:
            counts[index] += times
            free -= times * (sizes[index] // unit)
            light -= times * item_weights[index]
    return tuple(counts), float(best[space, most_weight])


def multisets(sizes: Sequence[int], capacity: int) -> float:
    """Return the number of multisets of sizes within the capacity, the empty multiset included."""
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    counts = np.zeros(space + 1)
    counts[0] = 1.0
    for size in sizes:
        width = size // unit
        for start in range(width, space + 1, width):
            part = counts[start : start + width]
            part += counts[start - width : start - width + len(part)]
    return float(counts.sum())
