"""What fits on one device together: legal MIG layouts, and shares that add up to at most the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gpuprof.device import Device
from gpuprof.mig import Layout, distinct_layouts
from gpuprof.share import Share

#: Packings of shares are listed one by one up to this many; beyond, only their sum is bounded.
MOST_PACKINGS = 2_000
_PER_PERCENT = 1_000


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way to cut up one device.

    Attributes
    ----------
    device : str
    slots : tuple of (Share, int)
        How often each share is there.
    layout : tuple of MigPlacement
        Where the instances stand; empty where the device is shared whole.
    """

    device: str
    slots: tuple[tuple[Share, int], ...]
    layout: Layout = ()


def mig_patterns(device: Device, shares: Collection[Share]) -> tuple[Pattern, ...]:
    """Return the maximal legal layouts of the instances among ``shares``, one for each different content."""
    names = {share.mig for share in shares if share.mig is not None}
    profiles = tuple(profile for profile in device.mig_profiles if profile.name in names)
    if not profiles:
        return ()
    patterns = []
    for layout in distinct_layouts(device, profiles):
        counts = Counter(Share(100.0, item.profile.name) for item in layout)
        patterns.append(Pattern(device.name, tuple(counts.items()), layout))
    return tuple(patterns)


def packing_patterns(device: Device, shares: Collection[Share]) -> tuple[Pattern, ...] | None:
    """Return the maximal multisets of whole-device ``shares`` within 100%, None when there are too many to list."""
    units = sorted({round(share.sm_pct * _PER_PERCENT) for share in shares if share.mig is None}, reverse=True)
    patterns = []
    for counts in _packings(units, 100 * _PER_PERCENT):
        slots = tuple((Share(unit / _PER_PERCENT), n) for unit, n in zip(units, counts, strict=True) if n)
        patterns.append(Pattern(device.name, slots))
        if len(patterns) > MOST_PACKINGS:
            return None
    return tuple(patterns)


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
