"""Gives spare capacity to the replicas with the least certain estimates.

A replica's risk is the increase of its time at the upper end of its estimate's interval, as a part of the time left by
its SLO: at 1 the upper end just keeps the SLO. Shares and MIG instances grow step by step, always for the replica at
most risk, as long as no replica on the device breaks an SLO. The devices and their replicas stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.mig import MigPlacement, legal_starts, make_placement
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.optimal.warm_start import balance_rates
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import MEANS, Problem
from gpuprof.placement.segment import Segments

#: Risk below which an estimate is treated as sure.
SURE = 0.01
#: Maximum number of different devices; equal devices are evaluated once.
_MOST_DEVICES = 300
_INTERVAL = 0.9  # of the estimates
_EPSILON = 1e-9


@dataclass(slots=True)
class SpareCapacity:
    """Spreads the spare capacity of a placement."""

    problem: Problem
    segments: Segments  #: Segments of the same problem.
    limit: Limit  #: When to stop.
    _mean: Segments = field(init=False)
    _upper: Segments = field(init=False)

    def __post_init__(self) -> None:
        options = self.problem.options
        self._mean = Segments(replace(self.problem, options=replace(options, confidence=MEANS)))
        self._upper = Segments(replace(self.problem, options=replace(options, confidence=_INTERVAL)))

    def distribute(self, gpus: Sequence[PlacedGpu]) -> tuple[PlacedGpu, ...]:
        """Return the devices with their spare capacity distributed.

        On a CPU nothing is distributed: the server itself runs on the spare cores.
        """
        done: dict[PlacedGpu, PlacedGpu] = {}
        for gpu in gpus:
            if gpu not in done and len(done) < _MOST_DEVICES and not self.limit.is_over:
                device = self.problem.device(gpu.device)
                done[gpu] = gpu if device.kind == "cpu" else self._distribute_on(device, gpu)
        return tuple(done.get(gpu, gpu) for gpu in gpus)

    def worst_risk(self, gpus: Sequence[PlacedGpu]) -> float:
        """Return the largest risk of any replica, 0.0 where all are sure."""
        different = list(dict.fromkeys(gpus))[:_MOST_DEVICES]
        risks = (
            self.risk(self.problem.device(gpu.device), partition, replica)
            for gpu in different
            for partition in gpu.partitions
            for replica in partition.replicas
        )
        return max(risks, default=0.0)

    def risk(self, device: Device, partition: PlacedPartition, replica: PlacedReplica) -> float:
        """Return (time at the upper end − time) / (SLO − time), at least 0; infinite where the queue would grow."""
        budget = self.problem.options.latency_budget
        demand = self.problem.demand(replica.model)
        limit = demand.slo.latency_ms * (1.0 if budget is None else budget)
        beside = partition.beside(replica)
        estimate = self._mean.estimate(device, replica.workload, beside)
        if estimate.latency_ms.high is None:
            return 0.0
        mean = self._mean.tail_ms(demand, device, replica.workload, replica.rate_rps, beside)
        high = self._upper.tail_ms(demand, device, replica.workload, replica.rate_rps, beside)
        if high <= mean:
            return 0.0
        return (high - mean) / (limit - mean) if mean < limit else math.inf

    def _distribute_on(self, device: Device, gpu: PlacedGpu) -> PlacedGpu:
        """Grow the replica at most risk until no replica grows any more."""
        refused: set[tuple[int, int]] = set()
        while not self.limit.is_over:
            risks = {
                (p, r): self.risk(device, partition, replica)
                for p, partition in enumerate(gpu.partitions)
                for r, replica in enumerate(partition.replicas)
                if (p, r) not in refused
            }
            place = max(risks, key=lambda one: risks[one], default=None)
            if place is None or risks[place] < SURE:
                return gpu
            grown = self._grow(device, gpu, place, risks[place])
            if grown is None:
                refused.add(place)
            else:
                gpu = grown
        return gpu

    def _grow(self, device: Device, gpu: PlacedGpu, place: tuple[int, int], risk: float) -> PlacedGpu | None:
        """Return the device with more for a replica: from its partition's free share, else a larger instance."""
        p, r = place
        partition = gpu.partitions[p]
        for candidate in (*self._larger_shares(device, partition, r), *self._larger_instances(device, gpu, p)):
            if self._is_sound(device, candidate) and self.risk(device, candidate, candidate.replicas[r]) < risk:
                return PlacedGpu(gpu.device, (*gpu.partitions[:p], candidate, *gpu.partitions[p + 1 :]))
        return None

    def _larger_shares(self, device: Device, partition: PlacedPartition, r: int) -> Iterator[PlacedPartition]:
        """Yield the partition with the replica's next known share, or with all the free share."""
        replica = partition.replicas[r]
        free_pct = 100.0 - math.fsum(one.share.sm_pct for one in partition.replicas)
        if free_pct <= _EPSILON:
            return
        most = min(100.0, replica.share.sm_pct + free_pct)
        known = self.problem.estimator.shares(replica.model, device)
        sizes = {one.sm_pct for one in known if one.mig == partition.mig and replica.share.sm_pct < one.sm_pct <= most}
        for size in (*sorted(sizes)[:1], most):
            grown = self._with_share(device, replica, Share(size, partition.mig))
            if grown is not None:
                replicas = (*partition.replicas[:r], grown, *partition.replicas[r + 1 :])
                yield replace(partition, replicas=replicas)

    def _larger_instances(self, device: Device, gpu: PlacedGpu, p: int) -> Iterator[PlacedPartition]:
        """Yield the partition in larger instances that fit beside the other instances in place, smallest first."""
        partition = gpu.partitions[p]
        if partition.mig is None:
            return
        others = [make_placement(device, str(o.mig), o.start or 0) for o in gpu.partitions if o is not partition]
        current = device.mig_profile(partition.mig)
        larger = sorted((one for one in device.mig_profiles if one.sms > current.sms), key=lambda one: one.sms)
        for profile in larger:
            starts = legal_starts(device, profile, others)
            if not starts:
                continue
            start = min(
                starts, key=lambda slot: not _covers(MigPlacement(profile, slot), current.memory_slices, partition)
            )
            moved = [self._with_share(device, one, Share(one.share.sm_pct, profile.name)) for one in partition.replicas]
            whole = tuple(one for one in moved if one is not None)
            if len(whole) == len(moved):
                yield PlacedPartition(whole, profile.name, start)

    def _with_share(self, device: Device, replica: PlacedReplica, share: Share) -> PlacedReplica | None:
        """Return the replica under another share, None where it has no estimate there."""
        try:
            estimate = self.segments.estimate(device, Workload(replica.model, replica.batch, share, replica.processes))
            self.segments.server(device, estimate.workload)
        except InputError:
            return None
        return replace(replica, share=share, memory_bytes=self.segments.memory_bytes(estimate))

    def _is_sound(self, device: Device, partition: PlacedPartition) -> bool:
        capacity = device.memory_bytes(partition.replicas[0].share)
        if sum(one.memory_bytes or 0 for one in partition.replicas) > capacity:
            return False
        return all(
            self.segments.meets(
                self.problem.demand(one.model), device, one.workload, one.rate_rps, partition.beside(one)
            )
            for one in partition.replicas
        )


def _covers(instance: MigPlacement, slices: int, partition: PlacedPartition) -> bool:
    """Return whether an instance covers the memory slices of the smaller instance."""
    start = partition.start or 0
    return set(range(start, start + slices)) <= set(instance.memory_slices)


def distribute_spare(problem: Problem, segments: Segments, spare: SpareCapacity, placement: Placement) -> Placement:
    """Return the placement with spare capacity given to the least certain replicas, and rates by their new
    capacities.
    """
    gpus = spare.distribute(placement.gpus)
    return replace(placement, gpus=gpus if placement.unplaced else balance_rates(problem, segments, gpus))


def raise_rates(problem: Problem, segments: Segments, placement: Placement) -> tuple[PlacedGpu, ...]:
    """Return the devices with the replicas of unmet demands at rates up to their capacity in place.

    Parameters
    ----------
    problem : Problem
    segments : Segments
        Of the same problem, for replicas with streams of their own.
    placement : Placement
    """
    missing = {one.model: one.rate_rps for one in placement.unplaced}
    gpus = []
    for gpu in placement.gpus:
        device, partitions = problem.device(gpu.device), []
        for partition in gpu.partitions:
            replicas = []
            for one in partition.replicas:
                raised = one
                if missing.get(one.model, 0.0) > 0.0:
                    demand = problem.demand(one.model)
                    able = segments.make(demand, device, one.workload, partition.beside(one))
                    more = 0.0 if able is None else min(missing[one.model], able.capacity_rps - one.rate_rps)
                    if more > 0.0:
                        missing[one.model] -= more
                        raised = replace(one, rate_rps=one.rate_rps + more)
                replicas.append(raised)
            partitions.append(replace(partition, replicas=tuple(replicas)))
        gpus.append(PlacedGpu(gpu.device, tuple(partitions)))
    return tuple(gpus)


def choose_least_risky(problem: Problem, spare: SpareCapacity, placements: Sequence[Placement]) -> Placement:
    """Return the placement that serves most, else costs least, else has the least risk, else moves fewest replicas."""
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}

    def rank(placement: Placement) -> tuple[object, ...]:
        moves = 0 if problem.previous is None else assign_devices(placement.gpus, problem.previous, devices).moves
        return *objective_value(problem, placement), round(spare.worst_risk(placement.gpus), 1), moves

    return min(placements, key=rank)
