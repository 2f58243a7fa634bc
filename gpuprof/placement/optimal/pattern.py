"""The configurations of a device, and the contents of its partitions: instances, or the whole device.

A replica in a partition takes a share of it and, where memory binds, some of its memory: a slot is both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.mig import Layout, distinct_layouts
from gpuprof.domain.share import Share
from gpuprof.placement.optimal.knapsack import best_packing, multisets

#: Maximum number of listed patterns of a partition; beyond, patterns are generated during the solution.
MOST_PACKINGS = 2_000
#: Maximum number of patterns among which the maximal patterns are found.
_MOST_LOOKED_AT = 20_000
#: Shares are counted in thousandths of a percent, rounded down: a third three times over fits a whole.
_PER_PERCENT = 1_000
#: A whole partition in the units of shares.
SPACE = 100 * _PER_PERCENT

#: A partition shared by percentage: a device and a MIG profile, None for the device as a whole.
PartitionKind = tuple[str, str | None]


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
        """Return every pattern to which nothing can be added, None when there are too many to list."""
        by_size = {(share_units(slot.share), slot.memory): slot for slot in self.slots}
        sizes = sorted(by_size, reverse=True)
        if not sizes:
            return ()
        if not self.memory and multisets([units for units, _ in sizes], SPACE) > _MOST_LOOKED_AT:
            return None
        units, memories = (np.array(column, dtype=np.int64) for column in zip(*sizes, strict=True))
        packings = np.empty((MOST_PACKINGS, len(sizes)), dtype=np.int64)
        from gpuprof.placement.optimal.pattern_kernel import fill_maximal  # numba takes long to import

        count = fill_maximal(units, memories, SPACE, self.memory, _MOST_LOOKED_AT, packings)
        if count < 0:
            return None
        slots = [by_size[size] for size in sizes]
        return tuple(
            SharePattern(self.kind, tuple((slot, n) for slot, n in zip(slots, counts, strict=True) if n))
            for counts in packings[:count].tolist()
        )

    def initial_patterns(self) -> tuple[SharePattern, ...]:
        """Return the initial patterns: a slot a few times or as often as it fits, with the largest slots beside it."""
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
    """Return a percentage as a part of `SPACE`."""
    return max(1, math.floor(share.sm_pct * _PER_PERCENT + 1e-6))


def _most_times(slot: PartitionSlot, space: int, memory: int) -> int:
    """Return the number of copies of a slot that fit into the remaining space and memory."""
    most = space // share_units(slot.share)
    return min(most, memory // slot.memory) if slot.memory else most
