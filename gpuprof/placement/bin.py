"""Bins of bin packing: the devices of a fleet while a policy fills them, and the splits of demands into segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.estimate import Workload
from gpuprof.placement.evidence import MPS_CLIENTS
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments

Cost = Callable[[Segment], float]

#: Maximum number of replicas of a model: a larger number means a mistyped rate.
MOST_REPLICAS = 10_000


@dataclass(slots=True)
class Bin:
    """A device and its partitions: MIG instances, or the whole device shared by percentage."""

    device: Device
    partitions: list[PlacedPartition] = field(default_factory=list)
    #: True if the replicas of the whole device have no enforced shares, each free to use the whole device.
    unshared: bool = False

    def add(self, replica: PlacedReplica, segments: Segments) -> bool:
        """Put ``replica`` here if geometry, shares, memory and all SLOs allow it; return whether they do."""
        if replica.share.mig is None:
            return self._add_shared(replica, segments)
        return self._add_instance(replica, segments)

    def add_instance(self, replica: PlacedReplica, start: int) -> None:
        """Put a replica into an instance of its own at ``start``, which must be free."""
        self.partitions.append(PlacedPartition((replica,), replica.share.mig, start))

    @property
    def is_empty(self) -> bool:
        """Return whether the device has no replicas."""
        return not self.partitions

    def to_gpu(self) -> PlacedGpu:
        """Return the device with its partitions, instances in the order of their slots."""
        return PlacedGpu(self.device.name, tuple(sorted(self.partitions, key=lambda p: p.start or 0)))

    def add_inside(self, position: int, replica: PlacedReplica, segments: Segments) -> bool:
        """Put ``replica`` into a partition if there is room and all its replicas keep their SLOs."""
        partition = self.partitions[position]
        candidate = replace(partition, replicas=(*partition.replicas, replica))
        if partition.mig != replica.share.mig or not fits_device(self.device, candidate):
            return False
        if not segments.holds(self.device, candidate):
            return False
        self.partitions[position] = candidate
        return True

    def _add_shared(self, replica: PlacedReplica, segments: Segments) -> bool:
        if self.partitions:
            return self.add_inside(0, replica, segments)
        single = PlacedPartition((replica,), unshared=self.unshared)
        if fits_device(self.device, single):
            self.partitions = [single]
        return bool(self.partitions)

    def _add_instance(self, replica: PlacedReplica, segments: Segments) -> bool:
        if any(partition.mig is None for partition in self.partitions):
            return False
        if replica.share.sm_pct < 100.0 and any(
            self.add_inside(position, replica, segments) for position in range(len(self.partitions))
        ):
            return True
        profile = self.device.mig_profile(str(replica.share.mig))
        start = self.free_start(profile)
        if start is None:
            return False
        self.partitions.append(PlacedPartition((replica,), profile.name, start))
        return True

    def free_start(self, profile: MigProfile) -> int | None:
        """Return the slot where an instance of ``profile`` blocks the fewest other placements, None if none is free."""
        present = [self.device.mig_profile(str(partition.mig)) for partition in self.partitions]
        if sum(item.name == profile.name for item in present) >= profile.max_count:
            return None
        used = {
            slot
            for partition, item in zip(self.partitions, present, strict=True)
            for slot in range(partition.start or 0, (partition.start or 0) + item.memory_slices)
        }
        free = [start for start in profile.start_slots if not used & set(range(start, start + profile.memory_slices))]
        return min(free, key=lambda start: (self._count_blocked(used, start, profile), -start), default=None)

    def _count_blocked(self, used: set[int], start: int, profile: MigProfile) -> int:
        """Count the presently possible placements of all profiles an instance at ``start`` would block."""
        own_slots = set(range(start, start + profile.memory_slices))
        count = 0
        for candidate in self.device.mig_profiles:
            for slot in candidate.start_slots:
                slots = set(range(slot, slot + candidate.memory_slices))
                count += not slots & used and bool(slots & own_slots)
        return count


def fits_device(device: Device, partition: PlacedPartition) -> bool:
    """Return whether the shares, the MPS clients and the memory of a partition suffice for its replicas."""
    replicas = partition.replicas
    return (
        (partition.unshared or sum(replica.share.sm_pct for replica in replicas) <= 100.0 + TOLERANCE)
        and (len(replicas) < 2 or sum(replica.processes for replica in replicas) <= MPS_CLIENTS)
        and sum(replica.memory_bytes or 0 for replica in replicas) <= device.memory_bytes(replicas[0].share)
    )


class FleetBins:
    """Opens devices on demand, at most as many of a kind as the fleet has."""

    def __init__(self, problem: Problem, segments: Segments) -> None:
        self._segments = segments
        self._devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
        self._left = {entry.device.name: entry.count for entry in problem.fleet.entries}
        self._full: dict[tuple[str, Workload, float], int] = {}
        self.bins: list[Bin] = []

    def first_fit(self, device: str, replica: PlacedReplica) -> bool:
        """Put ``replica`` on the first device of this kind that takes it, opening a device if available."""
        # A device that refused a replica keeps refusing it, since devices only fill up.
        workload = replace(replica.workload, model=self._segments.first_alike(replica.model))
        key = (device, workload, replica.rate_rps)
        for index in range(self._full.get(key, 0), len(self.bins)):
            self._full[key] = index
            if self.bins[index].device.name == device and self.bins[index].add(replica, self._segments):
                return True
        self._full[key] = len(self.bins)
        if self._left[device] == 0:
            return False
        fresh = Bin(self._devices[device])
        if not fresh.add(replica, self._segments):
            return False
        self._open(fresh)
        return True

    def open(self, device: str) -> Bin | None:
        """Return a new empty device of this kind, None when none is left."""
        if self._left[device] == 0:
            return None
        fresh = Bin(self._devices[device])
        self._open(fresh)
        return fresh

    def to_gpus(self) -> tuple[PlacedGpu, ...]:
        """Return the nonempty devices, kinds in the fleet's order."""
        order = list(self._devices)
        bins = [gpu_bin for gpu_bin in self.bins if not gpu_bin.is_empty]
        return tuple(gpu_bin.to_gpu() for gpu_bin in sorted(bins, key=lambda gpu_bin: order.index(gpu_bin.device.name)))

    def count(self, model: str) -> int:
        """Return the number of replicas of ``model`` on all devices."""
        return sum(
            replica.model == model
            for gpu_bin in self.bins
            for partition in gpu_bin.partitions
            for replica in partition.replicas
        )

    def _open(self, fresh: Bin) -> None:
        left = self._left[fresh.device.name]
        if left is not None:
            self._left[fresh.device.name] = left - 1
        self.bins.append(fresh)


@dataclass(frozen=True, slots=True)
class Cover:
    """Segments for a demand, and the rate that each of them serves."""

    parts: tuple[tuple[Segment, float], ...]
    missing_rps: float = 0.0  #: Rate the segments cannot serve.

    def replicas(self) -> tuple[tuple[str, PlacedReplica], ...]:
        """Return (device, replica) for each part."""
        return tuple((segment.device, segment.replica(rate)) for segment, rate in self.parts)


def make_cost(problem: Problem) -> Cost:
    """Return the function that gives the price per hour of a segment's part of a device."""
    prices = {entry.device.name: entry.price_per_hour for entry in problem.fleet.entries}
    return lambda segment: prices[segment.device] * segment.fraction


def cheapest_cover(demand: Demand, segments: Sequence[Segment], cost: Cost) -> Cover:
    """Return the cover of least cost, made of one kind of segment and a smaller last segment.

    The rate is divided in proportion to the capacities, so that no replica is at its limit while another has spare
    capacity.
    """
    limit = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    covers = (_fill_with(demand, segment, segments, cost, limit) for segment in segments)
    complete = [parts for parts in covers if parts is not None]
    if complete:
        cheapest = min(complete, key=lambda parts: (sum(map(cost, parts)), len(parts)))
        return share_out_rate(demand.rate_rps, cheapest)
    if not segments:
        return Cover((), demand.rate_rps)
    # No cover serves everything within the limit: serve as much as the allowed replicas can, at any cost.
    widest = max(segments, key=lambda segment: (segment.capacity_rps, -cost(segment)))
    return share_out_rate(demand.rate_rps, [widest] * limit)


def share_out_rate(rate_rps: float, segments: Sequence[Segment]) -> Cover:
    """Return the cover in which each segment serves in proportion to its capacity, at most its capacity."""
    total = sum(segment.capacity_rps for segment in segments)
    served_rps = min(rate_rps, total)
    parts = tuple((segment, served_rps * segment.capacity_rps / total) for segment in segments)
    return Cover(parts, rate_rps - served_rps if rate_rps > total * (1 + 1e-9) else 0.0)


def _fill_with(
    demand: Demand, main: Segment, segments: Sequence[Segment], cost: Cost, limit: int
) -> list[Segment] | None:
    """Return as many full segments ``main`` as possible, and the cheapest last segment; None if above ``limit``."""
    # Raised by less than the precision of any rate: a rate of exactly three capacities must not give two and a
    # remainder.
    count = math.floor(demand.rate_rps / main.capacity_rps * (1 + 1e-12))
    rest_rps = demand.rate_rps - count * main.capacity_rps
    last = []
    if rest_rps > demand.rate_rps * 1e-9:
        sufficient = [segment for segment in segments if segment.capacity_rps >= rest_rps]
        last = [min(sufficient or [main], key=lambda segment: (cost(segment), segment.capacity_rps))]
    return [main] * count + last if count + len(last) <= limit else None
