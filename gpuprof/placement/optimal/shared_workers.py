"""Shared workers: lightly loaded models take turns in one process instead of a process and a share each.

A process needs the memory of a context, and the smallest profiled share of a CPU is usually a core. The models of a
worker (`gpuprof.rules.turns`) run one batch at a time on all of its share and hold one context; every SLO must hold
with the waits for the other models' batches.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.deploy import to_map
from gpuprof.placement.evidence import MPS_CLIENTS
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.judge import TimeBounds, clip_bounds, is_proven_optimal, rank_map, sum_prices
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem, collect_evidence
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced
from gpuprof.rules.turns import held_shares, list_firsts

#: Steps of the rate that a worker serves of a demand it cannot serve whole: 1.6%, less than the error of estimates.
_PARTS = 64


def list_shareable(problem: Problem) -> Mapping[str, Device]:
    """Return the kinds of devices that may have shared workers, by name."""
    if problem.options.isolate or len(problem.demands) < 2:
        return {}
    by_queues = problem.options.latency_budget is None
    kinds = [entry.device for entry in problem.fleet.entries]
    return {device.name: device for device in kinds if device.kind == "cpu" or by_queues}


def share_workers(problem: Problem, placement: Placement, bounds: TimeBounds, limit: Limit) -> Placement:
    """Return the placement with light models in shared workers where this serves more demands, or costs less.

    ``bounds``: bounds for maps with shared workers. Unchanged with the option ``isolate``; under a latency budget only
    CPUs are shared, as the papers' rules know no shared process on a GPU.
    """
    devices = list_shareable(problem)
    if not devices or (not placement.unplaced and is_proven_optimal(problem, placement)):
        return placement
    packing = _Packing(problem, Segments(problem), devices)
    best = placement
    limit = limit.with_least((limit.seconds or 0.0) / 3.0)  # however long the search took
    for gpus in packing.list_maps(placement, limit):
        shared = with_unplaced(problem, packing.segments, replace(placement, gpus=gpus, unplaced=()))
        shared = clip_bounds(problem, bounds.add_to(replace(shared, found_by="shared workers")))
        is_better = rank_map(problem, shared) < rank_map(problem, best)
        if is_better and not check(to_map(problem, shared), collect_evidence(problem)):
            best = shared
    return best


@dataclass(slots=True)
class _Packing:
    """Packs light models into shared workers."""

    problem: Problem
    segments: Segments
    devices: Mapping[str, Device]  #: Devices that may have workers.

    def list_maps(self, placement: Placement, limit: Limit) -> Iterator[tuple[PlacedGpu, ...]]:
        """Yield the devices with light models in workers; the last as far as they were filled in time."""
        for light in self.list_light(placement):
            gpus = list[PlacedGpu]()
            with self.problem.limits.until(limit), suppress(TimeUpError):
                gpus = self.pack(placement, light)
                self.add_parts(gpus)
            yield tuple(gpus)
            if limit.is_over:
                return

    def list_light(self, placement: Placement) -> Iterator[tuple[str, ...]]:
        """Yield lists of models to move to workers: unplaced and single ones less busy than the mean, then all of them.

        The tightest SLO comes first, so that a worker's models are alike in it, then the busiest model.
        """
        counts = Counter(replica.model for gpu in placement.gpus for replica in gpu.replicas())
        busy = {shortfall.model: 0.0 for shortfall in placement.unplaced if not counts[shortfall.model]}
        for gpu in placement.gpus:
            for replica in gpu.replicas() if gpu.device in self.devices else ():
                if counts[replica.model] == 1 and not replica.share.mig:
                    busy[replica.model] = self._busy(self.problem.device(gpu.device), replica)
        demands = [self.problem.demand(model) for model in busy]
        demands.sort(key=lambda demand: (-demand.priority, demand.slo.latency_ms, -busy[demand.model]))
        for most in (math.fsum(busy.values()) / max(1, len(busy)), math.inf):
            light = tuple(demand.model for demand in demands if busy[demand.model] <= most)
            if len(light) > 1:
                yield light

    def pack(self, placement: Placement, light: Sequence[str]) -> list[PlacedGpu]:
        """Return the devices with the other models, and workers of light models beside them or on new devices.

        Models that fit nowhere are left out, and where all demands are met those that a cheaper map has no place for.
        """
        left, gpus = list(light), list[PlacedGpu]()
        most = math.inf if placement.unplaced else sum_prices(self.problem, placement.gpus) * (1.0 - TOLERANCE)
        for gpu in placement.gpus:
            partitions = (
                replace(part, replicas=tuple(replica for replica in part.replicas if replica.model not in light))
                for part in gpu.partitions
            )
            rest = PlacedGpu(gpu.device, tuple(partition for partition in partitions if partition.replicas))
            if rest.partitions:
                gpus.append(self._fill(rest, left, 1))
        usual: tuple[FleetEntry, int] | None = None
        while left and (entries := self._list_free(gpus, most)):
            options = [usual] if usual else [(e, n) for e in entries for n in self._list_counts(e.device, left)]
            filled = [self._fill(PlacedGpu(entry.device.name, ()), left[:], workers) for entry, workers in options]
            counts = [len(list(gpu.replicas())) for gpu in filled]
            best = max(range(len(options)), key=lambda n: (counts[n] / options[n][0].price_per_hour, -options[n][1]))
            if counts[best]:
                gpus.append(filled[best])
            placed = {replica.model for replica in filled[best].replicas()} or {left[0]}  # left out: fits on no device
            left = [model for model in left if model not in placed]
            is_usual = len(left) > counts[best] > 0 and options[best][0] in self._list_free(gpus, most)
            usual = options[best] if is_usual else None  # the last device may be of another kind
        return gpus

    def add_parts(self, gpus: list[PlacedGpu]) -> None:
        """Add unserved demands to workers of a fixed fleet: first those that a worker serves whole, then parts."""
        if any(entry.count is None for entry in self.problem.fleet.entries):
            return
        for is_whole, demand in itertools.product((True, False), self.problem.by_priority()):
            before = tuple(gpus)
            missing_rps = demand.rate_rps - Placement("", before).rate_rps(demand.model)
            quota = demand.max_replicas or math.inf
            quota -= sum(replica.model == demand.model for gpu in gpus for replica in gpu.replicas())
            for number, gpu in enumerate(before):
                if missing_rps > demand.rate_rps * TOLERANCE and quota > 0.0:
                    gpus[number], added_rps = self._add_part(gpu, demand.model, missing_rps, is_whole=is_whole)
                    missing_rps, quota = missing_rps - added_rps, quota - (added_rps > 0.0)
            if demand.rate_rps - missing_rps < (demand.min_goodput_rps or 0.0):
                gpus[:] = before

    def _add_part(self, gpu: PlacedGpu, model: str, rate_rps: float, *, is_whole: bool) -> tuple[PlacedGpu, float]:
        """Return a device with part of a rate added to its first worker that can serve some, and that part."""
        device, replicas = self.devices.get(gpu.device), tuple(gpu.replicas())
        workers = {replica.turns: replica for replica in replicas if replica.turns}

        def add(worker: PlacedReplica, parts: int) -> PlacedPartition | None:
            member = replace(worker, model=model, rate_rps=rate_rps * parts / _PARTS)
            return None if device is None else self._make_partition(device, replicas, [member])

        for worker in workers.values():
            counts = range(_PARTS, _PARTS + 1) if is_whole else range(1, _PARTS + 1)
            parts = counts[0] - 1 + bisect_left(counts, True, key=lambda count: add(worker, count) is None)
            if parts >= counts[0] and (partition := add(worker, parts)) is not None:
                return PlacedGpu(gpu.device, (partition,)), rate_rps * parts / _PARTS
        return gpu, 0.0

    def _list_counts(self, device: Device, models: Sequence[str]) -> set[int]:
        """Return the numbers of equal workers that fill a device with listed shares; they use small batches better."""
        shares = [share for share in self._list_shares(device, models) if not share.mig]
        return {int(100.0 / share.sm_pct * (1.0 + TOLERANCE)) for share in shares} or {1}

    def _list_free(self, gpus: Sequence[PlacedGpu], most: float) -> list[FleetEntry]:
        """Return the kinds of devices of which another may have workers, within the cost of a map."""
        used, spent = Counter(gpu.device for gpu in gpus), sum_prices(self.problem, gpus)
        return [
            entry
            for entry in self.problem.fleet.entries
            if entry.device.name in self.devices
            and used[entry.device.name] < (entry.count or math.inf)
            and spent + entry.price_per_hour <= most
        ]

    def _fill(self, gpu: PlacedGpu, left: list[str], workers: int) -> PlacedGpu:
        """Return a device with ``workers`` more workers; their models are removed from ``left``.

        The first models fill the workers. One that does not fit is passed over, unless the next does not fit either.
        When the time is up, the device is as far filled as it was.
        """
        device = self.devices.get(gpu.device)
        if device is None or any(part.mig or part.unshared or part.oversubscribed for part in gpu.partitions):
            return gpu
        replicas = tuple(gpu.replicas())
        free_pct = 100.0 - sum(held_shares((replica.share.sm_pct, replica.turns) for replica in replicas))
        share = self._find_share(device, left, free_pct / workers)
        filled, models, candidates, most = gpu, list[str](), left[:], 1
        while share and most:
            most, failed = 0, len(candidates) + 1
            while most + 1 < failed:
                count = min(2 * most + 1, (most + failed) // 2)
                members = [
                    PlacedReplica(model, 1, 1, share, self.problem.demand(model).rate_rps, turns=1 + number % workers)
                    for number, model in enumerate([*models, *candidates[:count]])
                ]
                try:
                    partition = self._make_partition(device, replicas, members)
                except TimeUpError:
                    partition = None
                if partition is None:
                    failed = count
                else:
                    filled, most = PlacedGpu(gpu.device, (partition,)), count
            models += candidates[:most]
            candidates = candidates[most + 1 :]
        left[:] = [model for model in left if model not in models]
        return filled

    def _find_share(self, device: Device, models: Sequence[str], most_pct: float) -> Share | None:
        """Return the largest share up to ``most_pct`` that is listed for all of the models."""
        shares = self._list_shares(device, models)
        fitting = [share for share in shares if not share.mig and share.sm_pct <= most_pct * (1.0 + TOLERANCE)]
        return max(fitting, key=lambda share: share.sm_pct, default=None)

    def _list_shares(self, device: Device, models: Sequence[str]) -> set[Share]:
        """Return the shares that are listed for all of the models."""
        listed = [set(self.problem.estimator.shares(self.segments.first_alike(model), device)) for model in models]
        return set.intersection(*listed) if listed else set()

    def _make_partition(
        self, device: Device, replicas: tuple[PlacedReplica, ...], members: Sequence[PlacedReplica]
    ) -> PlacedPartition | None:
        """Return the partition with workers' members added; None if memory, processes or an SLO forbid it."""
        tried = set[tuple[int, ...]]()
        for slos in (0.5, 2.0):  # batches as the arrivals within so many SLOs: the first that keeps every SLO
            batches = tuple(self._choose_batch(device, member, slos) for member in members)
            if batches in tried:
                continue
            tried.add(batches)
            sized = (replace(member, batch=batch) for member, batch in zip(members, batches, strict=True))
            partition = PlacedPartition((*replicas, *sized))
            with suppress(InputError):
                partition = self.segments.with_memory(device, partition)
                if self._fits(device, partition) and self.segments.keeps_slos(device, partition):
                    return partition
        return None

    def _choose_batch(self, device: Device, member: PlacedReplica, slos: float) -> int:
        """Return the smallest batch that holds the requests arriving in ``slos`` SLOs, else the largest."""
        arrivals = slos * member.rate_rps * self.problem.demand(member.model).slo.latency_ms / 1000.0
        model = self.segments.first_alike(member.model)
        batches = self.segments.search_space.listed_batches(model, device, member.share)
        return next((batch for batch in batches if batch >= arrivals), max(batches, default=1))

    def _fits(self, device: Device, partition: PlacedPartition) -> bool:
        """Return whether the memory and the number of processes suffice."""
        firsts = list_firsts([replica.turns for replica in partition.replicas])
        processes = sum(r.processes for r, is_first in zip(partition.replicas, firsts, strict=True) if is_first)
        has_memory = sum(replica.memory_bytes or 0 for replica in partition.replicas) <= device.dram_bytes
        return has_memory and (device.kind != "gpu" or processes <= MPS_CLIENTS)

    def _busy(self, device: Device, replica: PlacedReplica) -> float:
        """Return the part of a device's time a replica takes."""
        try:
            throughput_rps = self.segments.throughput_rps(device, replace(replica.workload, turns=0))
        except InputError:
            return device.fraction(replica.share)
        return device.fraction(replica.share) * replica.rate_rps / throughput_rps
