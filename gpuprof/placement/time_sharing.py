"""Shared workers: lightly loaded models take turns in one process instead of a process and a share each.

A process needs the memory of a context, and the least profiled share of a CPU is mostly a core. The models of a worker
(`gpuprof.rules.turns`) run one batch at a time on all of its share and hold one context; every SLO must hold with the
waits for the other models' batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Workload, batch_times, board_work
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import ModelQueues, ShapedQueue
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.incumbent import is_proven_optimal, objective_value, raise_by_work
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.problem import Problem, collect_evidence
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced
from gpuprof.rules.turns import held_shares, list_firsts

#: Parts of a device's time up to which the models with a single replica move to workers: a map for each.
_LIGHT = (0.1, 0.3, 1.0)
#: Numbers of workers of a device that are tried, each in an equal share: small batches use small shares better.
_WORKERS = (1, 2, 3, 5, 10)
#: Batches of a worker's models, as the arrivals within so many SLOs: the first that keeps every SLO.
_BATCH_SLOS = (0.5, 2.0)
#: Multiple of a mean batch from which batches are not evaluated for a bound, and largest mean batch used.
_FAR, _SMALL = 4.0, 16.0


def list_shareable(problem: Problem) -> Mapping[str, Device]:
    """Return the kinds of devices that may have shared workers, by name."""
    if problem.options.isolate or len(problem.demands) < 2:
        return {}
    by_queues = problem.options.latency_budget is None
    kinds = [entry.device for entry in problem.fleet.entries]
    return {device.name: device for device in kinds if device.kind == "cpu" or by_queues}


def share_workers(problem: Problem, placement: Placement, limit: Limit) -> Placement:
    """Return the placement with light models in shared workers where this serves more demands, or costs less.

    Bounds for maps without shared workers are replaced by bounds that hold with them. Unchanged with the option
    ``isolate``; under a latency budget only CPUs are shared, as the papers' rules know no shared process on a GPU.
    """
    devices = list_shareable(problem)
    if not devices:
        return placement
    least_price = min(entry.price_per_hour for entry in problem.fleet.entries)
    placement = replace(placement, lower_bound_gpus=1, lower_bound_cost_per_hour=least_price)
    if not placement.unplaced and is_proven_optimal(problem, raise_by_work(problem, placement)):
        return placement  # the work of a device bounds shared workers, too
    packing = _Packing(problem, Segments(problem), devices)
    best, tried = placement, set[tuple[str, ...]]()
    limit = limit.with_least((limit.seconds or 0.0) / 3.0)  # however long the search took
    with problem.limits.until(limit), suppress(TimeUpError):
        for most_busy in _LIGHT:
            light = packing.list_light(placement, most_busy)
            if len(light) < 2 or light in tried:
                continue
            tried.add(light)
            gpus = packing.pack(placement, light)
            shared = with_unplaced(problem, packing.segments, replace(placement, gpus=tuple(gpus), unplaced=()))
            shared = replace(shared, found_by="shared workers")
            is_better = objective_value(problem, shared) < objective_value(problem, best)
            if is_better and not check(to_map(problem, shared), collect_evidence(problem)):
                best = shared
    bounds = _Bounds(1, least_price, None)
    with problem.limits.until(limit), suppress(TimeUpError):
        bounds = _bound_shared(problem, packing.segments)
    is_whole = not best.unplaced
    return replace(
        best,
        lower_bound_gpus=bounds.gpus if is_whole else None,
        lower_bound_cost_per_hour=bounds.cost_per_hour if is_whole else None,
        upper_bound_goodput_rps=None if is_whole else bounds.goodput_rps,
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Lower bounds of the devices and the cost of maps of all demands; upper bound of the goodput of any map."""

    gpus: int
    cost_per_hour: float
    goodput_rps: float | None  #: None for a fleet of as many devices as needed.


@dataclass(slots=True)
class _Packing:
    """Packs models in workers."""

    problem: Problem
    segments: Segments
    devices: Mapping[str, Device]  #: Devices that may have workers.

    def list_light(self, placement: Placement, most_busy: float) -> tuple[str, ...]:
        """Return the models to be moved to workers: unplaced ones, and those with a replica that is busy little.

        The tightest SLO comes first, so that a worker's models are alike in it, then the busiest model.
        """
        busy: dict[str, float] = {shortfall.model: 0.0 for shortfall in placement.unplaced}
        counts = Counter(replica.model for gpu in placement.gpus for replica in gpu.replicas())
        for gpu in placement.gpus:
            for replica in gpu.replicas() if gpu.device in self.devices else ():
                part = self._busy(self.problem.device(gpu.device), replica)
                if counts[replica.model] == 1 and part <= most_busy and not replica.share.mig:
                    busy[replica.model] = part
        demands = [self.problem.demand(model) for model in busy]
        demands.sort(key=lambda demand: (-demand.priority, demand.slo.latency_ms, -busy[demand.model]))
        return tuple(demand.model for demand in demands)

    def pack(self, placement: Placement, light: Sequence[str]) -> list[PlacedGpu]:
        """Return the devices of the other models with workers of light models beside them, and further devices.

        Models that fit nowhere are left out.
        """
        left, gpus = list(light), list[PlacedGpu]()
        for gpu in placement.gpus:
            partitions = (
                replace(part, replicas=tuple(replica for replica in part.replicas if replica.model not in light))
                for part in gpu.partitions
            )
            rest = PlacedGpu(gpu.device, tuple(partition for partition in partitions if partition.replicas))
            if rest.partitions:
                gpus.append(self._fill(rest, left, 1))
        usual: tuple[FleetEntry, int] | None = None
        while left and (entries := self._list_free(gpus)):
            options = [usual] if usual else list(product(entries, _WORKERS))
            filled = [self._fill(PlacedGpu(entry.device.name, ()), left[:], workers) for entry, workers in options]
            counts = [len(list(gpu.replicas())) for gpu in filled]
            best = max(range(len(options)), key=lambda n: (counts[n] / options[n][0].price_per_hour, -options[n][1]))
            if counts[best]:
                gpus.append(filled[best])
            # A model that fits on no empty device is left out.
            del left[: max(1, counts[best])]
            is_usual = len(left) > counts[best] > 0 and options[best][0] in self._list_free(gpus)
            usual = options[best] if is_usual else None  # the last device may be of another kind
        return gpus

    def _list_free(self, gpus: Sequence[PlacedGpu]) -> list[FleetEntry]:
        """Return the kinds of devices of which another may have workers."""
        used = Counter(gpu.device for gpu in gpus)
        return [
            entry
            for entry in self.problem.fleet.entries
            if entry.device.name in self.devices and used[entry.device.name] < (entry.count or math.inf)
        ]

    def _fill(self, gpu: PlacedGpu, left: list[str], workers: int) -> PlacedGpu:
        """Return a device with so many workers more, of as many models from the begin of ``left`` as fit, taken off."""
        device = self.devices.get(gpu.device)
        if device is None or any(part.mig or part.unshared or part.oversubscribed for part in gpu.partitions):
            return gpu
        replicas = tuple(gpu.replicas())
        free_pct = 100.0 - sum(held_shares((replica.share.sm_pct, replica.turns) for replica in replicas))
        share = self._find_share(device, left, free_pct / workers)
        filled, most, failed = gpu, 0, len(left) + 1
        while share and most + 1 < failed:
            count = min(2 * most + 1, (most + failed) // 2)
            partition = self._make_partition(device, replicas, share, workers, left[:count])
            if partition is None:
                failed = count
            else:
                filled, most = PlacedGpu(gpu.device, (partition,)), count
        del left[:most]
        return filled

    def _find_share(self, device: Device, models: Sequence[str], most_pct: float) -> Share | None:
        """Return the largest share up to ``most_pct`` that is listed for all of the models."""
        listed = [set(self.problem.estimator.shares(self.segments.first_alike(model), device)) for model in models]
        if not listed:
            return None
        fitting = [s for s in set.intersection(*listed) if not s.mig and s.sm_pct <= most_pct * (1.0 + TOLERANCE)]
        return max(fitting, key=lambda share: share.sm_pct, default=None)

    def _make_partition(
        self,
        device: Device,
        replicas: tuple[PlacedReplica, ...],
        share: Share,
        workers: int,
        models: Sequence[str],
    ) -> PlacedPartition | None:
        """Return the partition with the models dealt to workers, None where memory, processes or an SLO forbid it."""
        tried = set[tuple[int, ...]]()
        for slos in _BATCH_SLOS:
            batches = tuple(self._choose_batch(device, model, share, slos) for model in models)
            if batches in tried:
                continue
            tried.add(batches)
            members = (
                PlacedReplica(model, batch, 1, share, self.problem.demand(model).rate_rps, turns=1 + number % workers)
                for number, (model, batch) in enumerate(zip(models, batches, strict=True))
            )
            partition = PlacedPartition((*replicas, *members))
            with suppress(InputError):
                partition = self.segments.with_memory(device, partition)
                if self._fits(device, partition) and self.segments.keeps_slos(device, partition):
                    return partition
        return None

    def _choose_batch(self, device: Device, model: str, share: Share, slos: float) -> int:
        """Return the least batch that holds the requests which arrive within so many SLOs, or the largest."""
        demand = self.problem.demand(model)
        arrivals = slos * demand.rate_rps * demand.slo.latency_ms / 1000.0
        batches = self.segments.search_space.listed_batches(self.segments.first_alike(model), device, share)
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


def _bound_shared(problem: Problem, segments: Segments) -> _Bounds:
    """Return bounds that hold for maps with and without shared workers.

    Each request takes part of a device's time (`_least_part`), and each model of a worker at least its memory without a
    context; their sums bound the devices, and the time of all devices the requests.
    """
    least_parts: list[tuple[float, float]] = []  # of a device's time, and the rate
    least_cost = least_memory = 0.0
    for demand in problem.demands:
        parts = [
            (part, part * entry.price_per_hour, _least_memory_part(segments, demand.model, entry.device))
            for entry in problem.fleet.entries
            if (part := _least_part(segments, demand, entry.device)) is not None
        ]
        if not parts:
            continue  # no map serves it
        least_parts.append((min(part for part, *_ in parts), demand.rate_rps))
        least_cost += min(cost for _, cost, _ in parts)
        least_memory += min(memory for *_, memory in parts)
    prices = {entry.price_per_hour for entry in problem.fleet.entries}
    count = max(1, math.ceil(max(math.fsum(part for part, _ in least_parts), least_memory) - 1e-6))
    cost = count * min(prices) if len(prices) == 1 else max(min(prices), least_cost)
    return _Bounds(count, cost, _bound_goodput(problem.fleet, least_parts))


def _bound_goodput(fleet: Fleet, least_parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the rate that the time of all devices allows, those requests first that take least of it."""
    counts = [entry.count for entry in fleet.entries]
    free, most_rps = math.fsum(count or 0 for count in counts), 0.0
    for part, rate_rps in sorted(least_parts, key=lambda pair: pair[0] / pair[1]):
        served = min(1.0, free / part) if part > 0.0 else 1.0
        most_rps, free = most_rps + served * rate_rps, free - served * part
    return None if None in counts else most_rps


def _least_part(segments: Segments, demand: Demand, device: Device) -> float | None:
    """Return the least part of a device's time a demand takes, None without a workload.

    Under the queueing model with Poisson requests at the rate r, the fraction q that keeps the SLO is in batches of at
    most 1 + 2 r SLO / q such requests on average, since requests of a batch that keep the SLO arrive within an SLO of
    each other. A convex lower bound of the time per request at this average bounds the mean time per request.
    """
    model, space = segments.first_alike(demand.model), segments.search_space
    if len(segments.problem.fleet.entries) > 1:  # the shares of many kinds would take many estimates
        work = board_work(segments.problem.estimator, model, device)
        if work is not None and work.source != MEASURED:
            return planned_ms(work, segments.problem.options.confidence) * demand.rate_rps / 1000.0
    timely = 1.0
    mean_batch = math.inf
    is_shaped = isinstance(segments.problem.queueing, ShapedQueue | ModelQueues)
    if segments.problem.options.latency_budget is None:
        timely = demand.slo.percentile / 100.0
    if segments.problem.options.latency_budget is None and not is_shaped:
        mean_batch = 1.0 + 2.0 * demand.rate_rps * demand.slo.latency_ms / 1000.0 / timely
    shares = list(segments.problem.estimator.shares(model, device))
    shares += [Share(pct, mig) for mig in {share.mig for share in shares} for pct in space.steps(model, device, mig)]
    parts = []
    for share in shares:
        if space.is_dense(model, device, share):
            return 0.0  # batches between the listed ones are too many to evaluate
        for count in space.processes(share):
            each_ms = _bound_ms(segments, device, Workload(model, 1, share, count), mean_batch)
            if each_ms is not None:
                parts.append(device.fraction(share) * each_ms * timely * demand.rate_rps / 1000.0)
    return min(parts, default=None)


def _bound_ms(segments: Segments, device: Device, workload: Workload, mean_batch: float) -> float | None:
    """Return a lower bound of the mean time per request in batches of a mean size, None without an estimate.

    ``workload``: its batch is ignored. Batches far beyond a small mean are treated as without work, which hardly lowers
    the bound. Large means are not used: the most efficient of the listed batches is the bound.
    """
    problem, batches = segments.problem, segments.search_space.listed_batches(workload.model, device, workload.share)
    count = math.ceil(_FAR * mean_batch) if mean_batch <= _SMALL else 0
    if count and max(batches, default=0) >= count:
        with suppress(InputError):
            arguments = workload.model, device, range(1, count + 1), workload.share, workload.processes
            figures = batch_times(problem.estimator, *arguments)
            each_ms = [planned_ms(figure, problem.options.confidence) / (n + 1) for n, figure in enumerate(figures)]
            return _bound_mean([*each_ms, 0.0], mean_batch) / workload.processes
    least = math.inf
    for batch in batches:
        with suppress(InputError):
            least = min(least, 1000.0 / segments.throughput_rps(device, replace(workload, batch=batch)))
    return None if math.isinf(least) else least


def _bound_mean(values: Sequence[float], mean: float) -> float:
    """Return a lower bound of the mean value of sizes 1, 2, … of a mean up to ``mean``, by their lower convex hull."""
    hull: list[tuple[float, float]] = []
    for point in enumerate(values, 1):
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    least = min((value for size, value in hull if size <= mean), default=hull[0][1])
    for (size, value), (next_size, next_value) in pairwise(hull):
        if size <= mean < next_size:
            least = min(least, value + (mean - size) * (next_value - value) / (next_size - size))
    return least


def _is_above(point: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Return whether a point is not below the line between two others."""
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return point[1] >= left[1] + slope * (point[0] - left[0])


def _least_memory_part(segments: Segments, model: str, device: Device) -> float:
    """Return the least part of a device's memory a model of a worker takes, without a context; 0 where unknown."""
    with suppress(InputError):
        batches = segments.search_space.listed_batches(segments.first_alike(model), device, Share())
        estimate = segments.estimate(device, Workload(model, min(batches, default=1), Share()))
        process_bytes = segments.memory_bytes(estimate)
        if process_bytes is not None:
            return estimate.added_bytes(process_bytes) / device.dram_bytes
    return 0.0
