"""How one device can be cut up, and what fits into the rooms that this makes: instances, or the whole device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.device import Device
from gpuprof.domain.mig import Layout, distinct_layouts
from gpuprof.domain.share import Share
from gpuprof.placement.optimal.knapsack import best_packing, multisets

#: Contents of a room are listed one by one up to this many; beyond, they are generated as the program asks for them.
MOST_PACKINGS = 2_000
#: The maximal ones are found among so many contents at most.
_MOST_LOOKED_AT = 50_000
#: How often a share stands beside others in the contents to begin with.
_MOST_ALIKE = 3
_PER_PERCENT = 1_000

#: What is shared by percentage: a device and one of its MIG profiles, None for the device as a whole.
Room = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut up one device.

    Attributes
    ----------
    device : str
    layout : tuple of MigPlacement
        Where the instances stand; empty where the device is shared whole.
    """

    device: str
    layout: Layout = ()

    def rooms(self) -> Counter[Room]:
        """Return how often each room is there."""
        return Counter((self.device, item.profile.name) for item in self.layout) or Counter([(self.device, None)])


@dataclass(frozen=True, slots=True)
class Content:
    """Shares that stand in one room together.

    Attributes
    ----------
    room : (str, str or None)
    slots : tuple of (Share, int)
        How often each share is there.
    """

    room: Room
    slots: tuple[tuple[Share, int], ...]


def cuts(device: Device, shares: Collection[Share]) -> tuple[Cut, ...]:
    """Return the ways to cut up ``device`` for these shares: whole, and each different maximal layout."""
    names = {share.mig for share in shares if share.mig is not None}
    profiles = tuple(profile for profile in device.mig_profiles if profile.name in names)
    whole = [Cut(device.name)] if any(share.mig is None for share in shares) else []
    layouts = distinct_layouts(device, profiles) if profiles else ()
    return (*whole, *(Cut(device.name, layout) for layout in layouts))


@dataclass(frozen=True, slots=True)
class Packer:
    """Finds the contents of one room.

    Parameters
    ----------
    room : (str, str or None)
    shares : tuple of Share
        That can stand there.
    """

    room: Room
    shares: tuple[Share, ...]

    def every(self) -> tuple[Content, ...] | None:
        """Return every content to which nothing can be added, None when there are too many to list."""
        by_units = {_units(share): share for share in self.shares}
        sizes = sorted(by_units, reverse=True)
        if multisets(sizes, 100 * _PER_PERCENT) > _MOST_LOOKED_AT:
            return None
        found = []
        for counts in _packings(sizes, 100 * _PER_PERCENT):
            slots = tuple((by_units[size], n) for size, n in zip(sizes, counts, strict=True) if n)
            found.append(Content(self.room, slots))
            if len(found) > MOST_PACKINGS:
                return None
        return tuple(found)

    def simple(self) -> tuple[Content, ...]:
        """Return the contents to begin with: a share a few times or as often as it fits, with the largest beside it."""
        order = sorted(self.shares, key=_units, reverse=True)
        found = []
        for share in order:
            most = 100 * _PER_PERCENT // _units(share)
            for times in {*range(1, min(most, _MOST_ALIKE) + 1), most}:
                found.append(self._filled(share, times, order))
        return tuple(dict.fromkeys(found))

    def best(self, worth: Mapping[Share, float]) -> tuple[Content, float]:
        """Return the content whose shares are worth most together, and what they are worth."""
        order = sorted(self.shares, key=_units)
        counts, value = best_packing([_units(s) for s in order], [worth.get(s, 0.0) for s in order], 100 * _PER_PERCENT)
        return Content(self.room, tuple((share, n) for share, n in zip(order, counts, strict=True) if n)), value

    def _filled(self, main: Share, times: int, falling: Sequence[Share]) -> Content:
        counts = Counter({main: times})
        room = 100 * _PER_PERCENT - times * _units(main)
        for share in falling:
            count = room // _units(share)
            if count and share != main:
                counts[share] += count
                room -= count * _units(share)
        return Content(self.room, tuple(counts.items()))


def _units(share: Share) -> int:
    return max(1, math.floor(share.sm_pct * _PER_PERCENT + 1e-6))


def _packings(units: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts of ``units`` to which nothing can be added within ``room``."""
    if not units:
        return
    if len(units) == 1:
        if room >= units[0]:
            yield (room // units[0],)
        else:
            yield (0,)
        return
    for count in range(room // units[0], -1, -1):
        for rest in _packings(units[1:], room - count * units[0]):
            left = room - count * units[0] - sum(n * unit for n, unit in zip(rest, units[1:], strict=True))
            if left < units[0]:  # else one more of the first would fit
                yield (count, *rest)
