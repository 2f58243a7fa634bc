"""Gives spare capacity to the replicas with the least certain estimates.

A replica's risk is the increase of its batch time at the upper end of its estimate's interval, as a part of the time
left by its SLO: at 1 the upper end just keeps the SLO. Shares and MIG instances grow step by step, always for the
replica at most risk, as long as no replica on the device breaks an SLO. The devices and their replicas stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.mig import legal_starts, make_placement
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Risk below which an estimate is treated as sure.
SURE = 0.01


@dataclass(slots=True)
class SpareCapacity:
    """Spreads the spare capacity of a placement."""

    problem: Problem
    segments: Segments  #: Segments of the same problem.
    limit: Limit  #: When to stop.

    def distribute(self, gpus: Sequence[PlacedGpu]) -> tuple[PlacedGpu, ...]:
        """Return the devices with their spare capacity distributed.

        On a CPU nothing is distributed: the server itself runs on the spare cores.
        """
        enlarged: dict[PlacedGpu, PlacedGpu] = {}
        for gpu in gpus:
            if gpu not in enlarged and not self.limit.is_over:
                device = self.problem.device(gpu.device)
                enlarged[gpu] = gpu if device.kind == "cpu" else self._distribute_on(device, gpu)
        return tuple(enlarged.get(gpu, gpu) for gpu in gpus)

    def find_risk(self, device: Device, partition: PlacedPartition, replica: PlacedReplica) -> float:
        """Return (time at the upper end − mean time) / (SLO − mean time); infinite where the mean is late."""
        budget = self.problem.options.latency_budget
        limit_ms = self.problem.demand(replica.model).slo.latency_ms * (1.0 if budget is None else budget)
        time = self.segments.estimate(device, replica.workload, partition.beside(replica)).latency_ms
        if time.high is None:
            return 0.0
        return (time.high - time.value) / (limit_ms - time.value) if time.value < limit_ms else math.inf

    def _distribute_on(self, device: Device, gpu: PlacedGpu) -> PlacedGpu:
        """Grow the replica at most risk until no replica grows any more."""
        rejected_places: set[tuple[int, int]] = set()
        while not self.limit.is_over:
            risks = {
                (p, r): self.find_risk(device, partition, replica)
                for p, partition in enumerate(gpu.partitions)
                for r, replica in enumerate(partition.replicas)
                if (p, r) not in rejected_places
            }
            place = max(risks, key=lambda key: risks[key], default=None)
            if place is None or risks[place] < SURE:
                return gpu
            candidate = self._grow(device, gpu, place, risks[place])
            if candidate is None:
                rejected_places.add(place)
            else:
                gpu = candidate
        return gpu

    def _grow(self, device: Device, gpu: PlacedGpu, place: tuple[int, int], risk: float) -> PlacedGpu | None:
        """Return the device with more for a replica: from its partition's free share, else a larger instance."""
        p, r = place
        partition = gpu.partitions[p]
        for candidate in (*self._larger_shares(device, partition, r), *self._larger_instances(device, gpu, p)):
            if self._is_sound(device, candidate) and self.find_risk(device, candidate, candidate.replicas[r]) < risk:
                return PlacedGpu(gpu.device, (*gpu.partitions[:p], candidate, *gpu.partitions[p + 1 :]))
        return None

    def _larger_shares(self, device: Device, partition: PlacedPartition, r: int) -> Iterator[PlacedPartition]:
        """Yield the partition with the replica's next listed share, or with all the free share."""
        replica = partition.replicas[r]
        most = min(100.0, replica.share.sm_pct + 100.0 - partition.taken_pct)
        shares = self.problem.estimator.shares(replica.model, device)
        sizes = {s.sm_pct for s in shares if s.mig == partition.mig and replica.share.sm_pct < s.sm_pct <= most}
        for size in (*sorted(sizes)[:1], most) if most > replica.share.sm_pct else ():
            larger = self._with_share(device, replica, Share(size, partition.mig))
            if larger is not None:
                yield replace(partition, replicas=(*partition.replicas[:r], larger, *partition.replicas[r + 1 :]))

    def _larger_instances(self, device: Device, gpu: PlacedGpu, p: int) -> Iterator[PlacedPartition]:
        """Yield the partition in larger instances that fit beside the other instances in place, smallest first."""
        partition = gpu.partitions[p]
        if partition.mig is None:
            return
        placements = [make_placement(device, str(o.mig), o.start or 0) for o in gpu.partitions if o is not partition]
        current = device.mig_profile(partition.mig)
        for profile in sorted(device.mig_profiles, key=lambda item: item.sms):
            starts = legal_starts(device, profile, placements)
            replicas = [self._with_share(device, r, Share(r.share.sm_pct, profile.name)) for r in partition.replicas]
            sound = tuple(replica for replica in replicas if replica is not None)
            if starts and profile.sms > current.sms and len(sound) == len(replicas):
                yield PlacedPartition(sound, profile.name, starts[0])

    def _with_share(self, device: Device, replica: PlacedReplica, share: Share) -> PlacedReplica | None:
        """Return the replica under another share, None where it has no estimate there."""
        try:
            estimate = self.segments.estimate(device, replace(replica.workload, share=share))
            self.segments.server(device, estimate.workload)
        except InputError:
            return None
        return replace(replica, share=share, memory_bytes=self.segments.memory_bytes(estimate))

    def _is_sound(self, device: Device, partition: PlacedPartition) -> bool:
        capacity = device.memory_bytes(partition.replicas[0].share)
        if sum(replica.memory_bytes or 0 for replica in partition.replicas) > capacity:
            return False
        return all(
            self.segments.meets(self.problem.demand(r.model), device, r.workload, r.rate_rps, partition.beside(r))
            for r in partition.replicas
        )
