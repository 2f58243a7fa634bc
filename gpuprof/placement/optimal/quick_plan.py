"""A first-fit heuristic that needs few estimates and so gives a feasible plan within any time limit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.cover import Cover, cheapest_cover, make_cost
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.placement import PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import NO_TIME, explain_unplaced, is_refused_everywhere

#: Load up to which a replica's SLO is checked; above, a larger batch or share is tried at once.
_LIKELY = 0.7
#: Part of the SLO: a batch within it likely keeps the SLO at a high load.
_PART = 0.4
#: Part of the load of full batches: a segment keeping its SLO up to it is taken at once, else the best of several.
_GOOD, _MOST_TRIED = 0.65, 12
#: Part of the time left when the first segment keeping its SLO is taken.
_EARLY = 0.6
#: Weight of a workload that may hardly keep its SLO, relative to a safe workload.
_LATE = 1e-3
#: Minimum processor time (s) for co-locating models.
_LEAST_S = 0.3


def make_quick_plan(problem: Problem, segments: Segments, limit: Limit) -> Placement:
    """Return the placement of `place_first_fit`, with a bound needing no queues if there is time."""
    return with_cost_bound(problem, segments, place_first_fit(problem, segments, limit), limit)


def place_first_fit(problem: Problem, segments: Segments, limit: Limit) -> Placement:
    """Return a first-fit placement of the segments evaluated so far.

    A handful of queues is solved for every demand without a segment, whatever the limit. Co-location is checked while
    there is time, for a moment in any case; then each replica gets a device of its own.
    """
    cost, until, early = make_cost(problem), limit.with_least(_LEAST_S), limit.keeping(_EARLY * (limit.seconds or 0.0))
    bins = FleetBins(problem, segments)
    known: dict[str, list[Segment]] = {}
    for demand in problem.by_priority():
        first = problem.demand(segments.first_alike(demand.model))
        if first.model not in known:
            devices = (entry.device for entry in problem.fleet.entries)
            known[first.model] = [one for device in devices for one in _segments(segments, first, device, early)]
        found = [replace(one, model=demand.model) for one in known[first.model]]
        cover = cheapest_cover(demand, found, cost)
        _place_cover(problem, segments, cover, bins, until)
    placed = Placement("optimal", bins.to_gpus(), found_by="first fit")
    served = placed.rates_rps()
    unplaced = tuple(_list_unplaced(problem, segments, served))
    return Placement("optimal", placed.gpus, unplaced, found_by=placed.found_by)


def _segments(segments: Segments, demand: Demand, device: Device, early: Limit) -> tuple[Segment, ...]:
    """Return the evaluated segments, and a segment that is quick to find unless they serve everything."""
    known = segments.looked_at(demand, device)
    if any(one.capacity_rps >= demand.rate_rps for one in known):
        return known
    quick = _quick_segment(segments, demand, device, early)
    return known if quick is None else (*known, quick)


def _place_cover(problem: Problem, segments: Segments, cover: Cover, bins: FleetBins, limit: Limit) -> None:
    for device, replica in cover.replicas():
        try:
            with problem.limits.until(limit):
                bins.first_fit(device, replica)
        except TimeUpError:
            _place_alone(segments, bins, device, replica)


def _place_alone(segments: Segments, bins: FleetBins, device: str, replica: PlacedReplica) -> None:
    fresh = bins.open(device)
    if fresh is not None:
        fresh.add(replica, segments)


def _quick_segment(segments: Segments, demand: Demand, device: Device, early: Limit) -> Segment | None:
    """Return the segment of the smallest share, by bisection, that serves everything; else the most efficient
    segment.
    """
    shares = segments.problem.estimator.shares(demand.model, device)
    smallest, low, high = None, 0, len(shares)
    place, step = bisect_left(shares, True, key=lambda share: _is_likely(segments, demand, device, share)), 1
    while low < high:
        # Steps from the likely sufficient share, doubled each time: every share takes a queue or two.
        middle = place if low <= place < high else (low + high) // 2
        able = _smallest_sufficient(segments, demand, device, shares[middle])
        if able is None:
            low, place = middle + 1, middle + step
        else:
            smallest, high, place = able, middle, middle - step
        step *= 2
    return _most_efficient(segments, demand, device, early) if smallest is None else smallest


def _is_likely(segments: Segments, demand: Demand, device: Device, share: Share) -> bool:
    """Return whether a workload under the share likely keeps the SLO at the demand's rate, by its times alone."""
    return any(
        demand.rate_rps <= _LIKELY * most_rps and segments.latency_ms(device, workload) <= demand.slo.latency_ms * _PART
        for most_rps, workload in _throughputs(segments, demand, device, share)
    )


def _most_efficient(segments: Segments, demand: Demand, device: Device, early: Limit) -> Segment | None:
    """Return a segment serving much for its share: the best of a few by full batches and remaining time."""
    ranked: list[tuple[float, Workload]] = []
    for share in segments.problem.estimator.shares(demand.model, device):
        for most_rps, workload in _throughputs(segments, demand, device, share):
            # A request behind another batch takes twice the batch time: the nearer to the SLO, the less is served.
            left = 1.0 - 2.0 * segments.latency_ms(device, workload) / demand.slo.latency_ms
            ranked.append((-most_rps / device.fraction(share) * (left if left > 0.0 else _LATE), workload))
    ranked.sort(key=_by_rate)
    best: Segment | None = None
    for number, (_, workload) in enumerate(ranked):
        made = segments.make(demand, device, workload)
        if made is not None and (best is None or _yield(device, made) > _yield(device, best)):
            best = made
        # A segment keeping its SLO only at a negligible load takes dozens of replicas, where the next may need few.
        most_rps = segments.throughput_rps(device, workload)
        good = made is not None and made.capacity_rps >= min(demand.rate_rps, _GOOD * most_rps)
        if best is not None and (good or number >= _MOST_TRIED or early.is_over):
            break
    return best


def _yield(device: Device, segment: Segment) -> float:
    """Return the rate of a segment per part of the device."""
    return segment.capacity_rps / device.fraction(segment.share)


def _by_rate(pair: tuple[float, Workload]) -> tuple[object, ...]:
    """Return the sorting key of workloads: shares of the whole device and of instances may serve equal rates."""
    rate, workload = pair
    return rate, workload.share.mig or "", workload.share.sm_pct, workload.batch, workload.processes


def _smallest_sufficient(segments: Segments, demand: Demand, device: Device, share: Share) -> Segment | None:
    """Return the segment of the smallest batch that most likely serves everything, None where it does not."""
    for most_rps, workload in _throughputs(segments, demand, device, share):
        if demand.rate_rps <= _LIKELY * most_rps:
            made = segments.make(demand, device, workload, least_rps=demand.rate_rps)
            return made if made is not None and made.capacity_rps >= demand.rate_rps else None
    return None


def _throughputs(segments: Segments, demand: Demand, device: Device, share: Share) -> Iterator[tuple[float, Workload]]:
    """Yield the workloads, fewest processes first, with their requests/s when every batch is full."""
    for workload in segments.workloads(demand.model, device, share):
        try:
            yield segments.throughput_rps(device, workload), workload
        except InputError:
            continue


def _list_unplaced(problem: Problem, segments: Segments, served: dict[str, float]) -> Iterator[Unplaced]:
    for demand in problem.by_priority():
        missing_rps = demand.rate_rps - served.get(demand.model, 0.0)
        if missing_rps > demand.rate_rps * 1e-9:
            reason = NO_TIME
            if is_refused_everywhere(segments, demand):
                reason = explain_unplaced(problem, segments, demand)
            yield Unplaced(model=demand.model, rate_rps=missing_rps, reason=reason)
