"""How one device can be configured, and what fits into its partitions: instances, or the whole device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.device import Device
from gpuprof.domain.mig import Layout, distinct_layouts
from gpuprof.domain.share import Share
from gpuprof.placement.optimal.knapsack import best_packing, multisets

#: Patterns of a partition are listed up to this many; beyond, they are generated as the program asks for them.
MOST_PACKINGS = 2_000
#: The maximal ones are found among so many patterns at most.
_MOST_LOOKED_AT = 50_000
#: How often a share stands beside others in the patterns to begin with.
_MOST_ALIKE = 3
_PER_PERCENT = 1_000

#: What is shared by percentage: a device and one of its MIG profiles, None for the device as a whole.
PartitionKind = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class DeviceConfiguration:
    """A configuration of one device.

    Attributes
    ----------
    device : str
    layout : tuple of MigPlacement
        Where the instances stand; empty where the device is shared whole.
    """

    device: str
    layout: Layout = ()

    def partitions(self) -> Counter[PartitionKind]:
        """Return how often each partition is there."""
        return Counter((self.device, item.profile.name) for item in self.layout) or Counter([(self.device, None)])


@dataclass(frozen=True, slots=True)
class SharePattern:
    """Shares that one partition holds together.

    Attributes
    ----------
    kind : (str, str or None)
    slots : tuple of (Share, int)
        How often each share is there.
    """

    kind: PartitionKind
    slots: tuple[tuple[Share, int], ...]


def list_configurations(device: Device, shares: Collection[Share]) -> tuple[DeviceConfiguration, ...]:
    """Return the ways to configure ``device`` for these shares: whole, and each different maximal layout."""
    names = {share.mig for share in shares if share.mig is not None}
    profiles = tuple(profile for profile in device.mig_profiles if profile.name in names)
    whole = [DeviceConfiguration(device.name)] if any(share.mig is None for share in shares) else []
    layouts = distinct_layouts(device, profiles) if profiles else ()
    return (*whole, *(DeviceConfiguration(device.name, layout) for layout in layouts))


@dataclass(frozen=True, slots=True)
class PatternPacker:
    """Finds the patterns of one partition.

    Parameters
    ----------
    kind : (str, str or None)
    shares : tuple of Share
        That can stand there.
    """

    kind: PartitionKind
    shares: tuple[Share, ...]

    def list_maximal(self) -> tuple[SharePattern, ...] | None:
        """Return every pattern to which nothing can be added, None when there are too many to list."""
        by_units = {_units(share): share for share in self.shares}
        sizes = sorted(by_units, reverse=True)
        if multisets(sizes, 100 * _PER_PERCENT) > _MOST_LOOKED_AT:
            return None
        found = []
        for counts in _packings(sizes, 100 * _PER_PERCENT):
            slots = tuple((by_units[size], n) for size, n in zip(sizes, counts, strict=True) if n)
            found.append(SharePattern(self.kind, slots))
            if len(found) > MOST_PACKINGS:
                return None
        return tuple(found)

    def initial_patterns(self) -> tuple[SharePattern, ...]:
        """Return the patterns to begin with: a share a few times or as often as it fits, with the largest beside it."""
        order = sorted(self.shares, key=_units, reverse=True)
        found = []
        for share in order:
            most = 100 * _PER_PERCENT // _units(share)
            for times in {*range(1, min(most, _MOST_ALIKE) + 1), most}:
                found.append(self._fill_with(share, times, order))
        return tuple(dict.fromkeys(found))

    def best_pattern(self, values: Mapping[Share, float]) -> tuple[SharePattern, float]:
        """Return the pattern whose shares are worth most together, and what they are worth."""
        order = sorted(self.shares, key=_units)
        counts, value = best_packing(
            [_units(s) for s in order], [values.get(s, 0.0) for s in order], 100 * _PER_PERCENT
        )
        return SharePattern(self.kind, tuple((share, n) for share, n in zip(order, counts, strict=True) if n)), value

    def _fill_with(self, main: Share, times: int, falling: Sequence[Share]) -> SharePattern:
        counts = Counter({main: times})
        capacity = 100 * _PER_PERCENT - times * _units(main)
        for share in falling:
            count = capacity // _units(share)
            if count and share != main:
                counts[share] += count
                capacity -= count * _units(share)
        return SharePattern(self.kind, tuple(counts.items()))


def _units(share: Share) -> int:
    return max(1, math.floor(share.sm_pct * _PER_PERCENT + 1e-6))


def _packings(units: Sequence[int], capacity: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts of ``units`` to which nothing can be added within ``capacity``."""
    if not units:
        return
    if len(units) == 1:
        if capacity >= units[0]:
            yield (capacity // units[0],)
        else:
            yield (0,)
        return
    for count in range(capacity // units[0], -1, -1):
        for rest in _packings(units[1:], capacity - count * units[0]):
            left = capacity - count * units[0] - sum(n * unit for n, unit in zip(rest, units[1:], strict=True))
            if left < units[0]:  # else one more of the first would fit
                yield (count, *rest)
