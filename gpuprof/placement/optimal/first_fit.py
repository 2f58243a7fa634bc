"""The first map of a search: first fit of the smallest sufficient shares, on a single kind of device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import batch_times
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import FleetBins
from gpuprof.placement.cover import cheapest_cover, make_cost
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments


def place_first_fit(problem: Problem, segments: Segments, demands: Sequence[Demand]) -> tuple[PlacedGpu, ...]:
    """Return the devices of a first fit, the largest shares of the highest priority first.

    Few queues are solved: for each demand a bisection of the listed shares finds the smallest that serves everything;
    only a demand that none of them serves whole takes the capacity of every share.
    """
    cost, bins = make_cost(problem), FleetBins(problem, segments)
    table: dict[str, list[Segment]] = {}
    parts = []
    for demand in demands:
        first = problem.demand(segments.first_alike(demand.model))
        if first.model not in table:
            devices = (entry.device for entry in problem.fleet.entries)
            table[first.model] = [segment for device in devices for segment in _list_quick(segments, first, device)]
        cover = cheapest_cover(demand, [replace(segment, model=demand.model) for segment in table[first.model]], cost)
        parts += [(-demand.priority, -replica.share.sm_pct, device, replica) for device, replica in cover.replicas()]
    for _, _, device, replica in sorted(parts, key=lambda part: part[:2]):
        bins.first_fit(device, replica)
    return bins.to_gpus()


def _list_quick(segments: Segments, demand: Demand, device: Device) -> Sequence[Segment]:
    shares = _list_shares(segments, demand, device)
    index = bisect_left(shares, True, key=lambda share: segments.serving_all(demand, device, share) is not None)
    if index == len(shares):
        return segments.best(demand, device)
    smallest = segments.serving_all(demand, device, shares[index])
    return () if smallest is None else (smallest,)


def can_serve(problem: Problem, segments: Segments, demand: Demand) -> bool:
    """Return whether some kind of device alone serves a part of the demand in time; large shares are tried first."""
    return any(
        segments.make(demand, entry.device, workload) is not None
        for entry in problem.fleet.entries
        for share in _list_shares(segments, demand, entry.device)[::-1]
        for workload in segments.workloads(demand.model, entry.device, share)
    )


def _list_shares(segments: Segments, demand: Demand, device: Device) -> Sequence[Share]:
    """Return the listed shares, none where the estimator has no answer for the device."""
    with suppress(InputError):
        return segments.problem.estimator.shares(demand.model, device)
    return ()


def rank_kinds(problem: Problem, segments: Segments) -> list[tuple[float, FleetEntry]]:
    """Return the kinds of devices that can run all demands, each with about its cost for them, cheapest first.

    The cost is of whole devices at full load, in batches within the SLOs.
    """
    ranking = []
    for entry in problem.fleet.entries:
        devices = math.fsum(_count_devices(segments, demand, entry.device) for demand in problem.demands)
        if math.isfinite(devices):
            ranking.append((entry.price_per_hour * max(1, math.ceil(devices)), entry))
    return sorted(ranking, key=lambda pair: pair[0])


def _count_devices(segments: Segments, demand: Demand, device: Device) -> float:
    """Return the number of devices that a demand fills with full batches, infinity where no batch is in time."""
    most, problem = 0.0, segments.problem
    with suppress(InputError):
        for share in problem.estimator.shares(demand.model, device)[-1:]:
            sizes = segments.search_space.listed_batches(demand.model, device, share)
            times = batch_times(problem.estimator, demand.model, device, sizes, share, 1)
            for size, time in zip(sizes, times, strict=True):
                latency_ms = planned_ms(time, problem.options.confidence)
                if latency_ms <= demand.slo.latency_ms:
                    most = max(most, 1000.0 * size / latency_ms / device.fraction(share))
    return demand.rate_rps / most if most > 0.0 else math.inf


def list_single_kinds(problem: Problem, segments: Segments) -> Iterator[tuple[float, Problem]]:
    """Yield the problem on each kind alone that has as many devices as needed, with about its cost; then on all.

    On all kinds where devices are counted, or no kind alone is known to run all demands.
    """
    kinds = problem.fleet.entries
    ranking = rank_kinds(problem, segments) if len(kinds) > 1 else []
    unlimited = [(cost, entry) for cost, entry in ranking if entry.count is None]
    for cost, entry in unlimited:
        yield cost, replace(problem, fleet=Fleet((entry,)), alike={})
    if not unlimited or any(entry.count is not None for entry in kinds):
        yield 0.0, problem
