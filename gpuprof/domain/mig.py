"""MIG geometry: legal sets of instances on a GPU and their start slots.

A GPU with MIG has memory slices (8; 4 on the A30) and compute slices (7; 4 on the A30). An instance takes its profile's
memory slices from its start slot on, and may start only at the slots listed by the driver for the profile. The driver
chooses the compute slices; only their number is bounded. A layout is legal when every start is listed, no memory slice
is taken twice, the compute slices suffice and no profile exceeds the driver's maximum count (NVIDIA MIG User Guide,
"Partitioning"; ``nvidia-smi mig -lgipp``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from gpuprof.domain.device import Device, MigProfile


@dataclass(frozen=True, slots=True)
class MigPlacement:
    """A MIG instance on a GPU: its profile and first memory slice."""

    profile: MigProfile
    start: int

    def __str__(self) -> str:
        return f"{self.profile.name}@{self.start}"

    @property
    def memory_slices(self) -> range:
        """Memory slices of the instance."""
        return range(self.start, self.start + self.profile.memory_slices)

    @property
    def mask(self) -> int:
        """Memory slices of the instance as a bit mask."""
        return ((1 << self.profile.memory_slices) - 1) << self.start


Layout = tuple[MigPlacement, ...]


def make_placement(device: Device, profile: str, start: int) -> MigPlacement:
    """Return the instance of the named profile at ``start``, legal or not.

    Raises `InputError` when the device has no such profile.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> make_placement(device("a100-80"), "3g.40gb", 4).start
    4
    """
    return MigPlacement(device.mig_profile(profile), start)


def compute_slices(device: Device) -> int:
    """Return the number of compute slices of the GPU, equal to that of its largest profile; 0 without MIG."""
    return max((profile.compute_slices for profile in device.mig_profiles), default=0)


def find_violation(device: Device, placements: Sequence[MigPlacement]) -> str | None:
    """Return the first rule violated by the placements, with the values; None when they are legal in any order.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> gpu = device("a100-80")
    >>> find_violation(gpu, [make_placement(gpu, "3g.40gb", start) for start in (0, 2)])
    '3g.40gb may start at slots 0, 4 but got 2'
    """
    occupants: dict[int, MigPlacement] = {}
    for item in placements:
        if item.profile not in device.mig_profiles:
            return f"{device.name} has no MIG profile {item.profile.name}"
        if item.start not in item.profile.start_slots:
            slots = ", ".join(map(str, item.profile.start_slots))
            return f"{item.profile.name} may start at slots {slots} but got {item.start}"
        for memory_slice in item.memory_slices:
            if memory_slice in occupants:
                return f"{item} overlaps {occupants[memory_slice]} at memory slice {memory_slice}"
            occupants[memory_slice] = item
    return _find_excess(device, placements)


def is_legal(device: Device, placements: Sequence[MigPlacement]) -> bool:
    """Return whether the driver would create these instances on one GPU."""
    return find_violation(device, placements) is None


def legal_starts(device: Device, profile: MigProfile, placed: Sequence[MigPlacement]) -> tuple[int, ...]:
    """Return the slots, ascending, at which an instance of ``profile`` can be added to the legal ``placed``.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> gpu = device("a100-80")
    >>> legal_starts(gpu, make_placement(gpu, "2g.20gb", 0).profile, [make_placement(gpu, "3g.40gb", 4)])
    (0, 2)
    """
    if _find_excess(device, [*placed, MigPlacement(profile, 0)]) is not None:
        return ()
    occupied = _mask(placed)
    return tuple(start for start in profile.start_slots if not MigPlacement(profile, start).mask & occupied)


def basic_profiles(device: Device) -> tuple[MigProfile, ...]:
    """Return the profiles without variants that only add memory (``1g.20gb`` to ``1g.10gb``)."""
    smallest: dict[int, MigProfile] = {}
    for profile in device.mig_profiles:
        least_profile = smallest.setdefault(profile.compute_slices, profile)
        if profile.memory_slices < least_profile.memory_slices:
            smallest[profile.compute_slices] = profile
    return tuple(smallest.values())


# Keyed by the geometry: a Device holds mappings and has no hash. Devices of equal geometry share the result.
@cache
def _enumerate_maximal_layouts(device_key: tuple[int, int, tuple[MigProfile, ...]]) -> tuple[Layout, ...]:
    memory, compute, profiles = device_key
    layouts: list[Layout] = []

    def extend(slot: int, chosen: Layout) -> None:
        if slot == memory:
            if not any(_fits(chosen, profile, start, compute) for profile in profiles for start in profile.start_slots):
                layouts.append(chosen)
            return
        # Slots are filled in ascending order, so each layout is enumerated once.
        for profile in profiles:
            if slot in profile.start_slots and _fits(chosen, profile, slot, compute):
                extend(slot + profile.memory_slices, (*chosen, MigPlacement(profile, slot)))
        # A slot may stay empty in a maximal layout: no profile starts there, or the compute slices are used up.
        extend(slot + 1, chosen)

    extend(0, ())
    return tuple(layouts)


def maximal_layouts(device: Device, profiles: Sequence[MigProfile] | None = None) -> tuple[Layout, ...]:
    """Return every legal layout to which no instance can be added, ordered by start.

    ``profiles``: profiles of the layouts; by default all profiles of the device. An A100 has 19 maximal layouts of its
    `basic_profiles` (ParvaGPU's figure 1 also lists 19, including a 2g at a slot refused by the driver), and 78 of all.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> a100 = device("a100-80")
    >>> len(maximal_layouts(a100, basic_profiles(a100))), len(maximal_layouts(a100))
    (19, 78)
    >>> find_violation(a100, [make_placement(a100, "3g.40gb", 2)])
    '3g.40gb may start at slots 0, 4 but got 2'
    """
    allowed = device.mig_profiles if profiles is None else tuple(profiles)
    return _enumerate_maximal_layouts((device.mig_slices, compute_slices(device), allowed))


def count_profiles(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the count of each profile in the layout, sorted by name: a config of ``nvidia-mig-parted``.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> gpu = device("a100-80")
    >>> count_profiles(tuple(make_placement(gpu, "2g.20gb", start) for start in (0, 2)))
    (('2g.20gb', 2),)
    """
    return tuple(sorted(Counter(item.profile.name for item in layout).items()))


def distinct_layouts(device: Device, profiles: Sequence[MigProfile] | None = None) -> tuple[Layout, ...]:
    """Return the maximal layouts with distinct `count_profiles`, the first of each in `maximal_layouts`."""
    layouts_by_count: dict[tuple[tuple[str, int], ...], Layout] = {}
    for layout in maximal_layouts(device, profiles):
        layouts_by_count.setdefault(count_profiles(layout), layout)
    return tuple(layouts_by_count.values())


def _fits(chosen: Layout, profile: MigProfile, start: int, compute: int) -> bool:
    return (
        not MigPlacement(profile, start).mask & _mask(chosen)
        and profile.compute_slices + sum(item.profile.compute_slices for item in chosen) <= compute
        and sum(item.profile == profile for item in chosen) < profile.max_count
    )


def _mask(placements: Sequence[MigPlacement]) -> int:
    mask = 0
    for item in placements:
        mask |= item.mask
    return mask


def _find_excess(device: Device, placements: Sequence[MigPlacement]) -> str | None:
    for profile, count in Counter(item.profile for item in placements).items():
        if count > profile.max_count:
            return f"at most {profile.max_count} × {profile.name} fit but got {count}"
    wanted, available = sum(item.profile.compute_slices for item in placements), compute_slices(device)
    if wanted > available:
        return f"the instances take {wanted} compute slices but the GPU has {available}"
    return None
