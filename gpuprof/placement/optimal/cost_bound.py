"""A lower bound on the cost without queueing: the devices the demands take at full utilisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.alone_bound import bound_queues_alone
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.search_space import PARTS
from gpuprof.placement.segment import Segments

#: Seconds available to a bound in any case.
_LEAST_S = 0.5
#: Maximum number of demands for which each part of an instance is evaluated.
_MOST_DEMANDS = 40


def with_cost_bound(problem: Problem, segments: Segments, placement: Placement, limit: Limit) -> Placement:
    """Return the placement with bounds over every map serving as much of the demands.

    Under a queueing model with tables, the bound is `bound_queues_alone`. Otherwise a request costs at least its part
    of a full batch under the share with the most requests per price. With many demands, parts of instances are assumed
    to do as much as the whole, which is quick and loose. The bound takes the time left by the limit, at least half a
    second: demands not evaluated by then add nothing to it.
    """
    bound_limit = limit if limit.left_s is None else Limit(max(limit.left_s, _LEAST_S))
    rates, cost = placement.rates_rps(), 0.0
    if problem.options.latency_budget is None and not placement.unplaced:
        cost = bound_queues_alone(problem, segments, bound_limit)
    if cost <= 0.0:
        cost = _bound_full_batches(problem, segments, rates, bound_limit)
    prices = [entry.price_per_hour for entry in problem.fleet.entries]
    serves_any = any(rate > 0.0 for rate in rates.values())
    # The most expensive kind gives the fewest devices for the cost: a bound for every mix of kinds.
    gpus = max(math.ceil(cost / max(prices) - 1e-6), int(serves_any))
    least = gpus * min(prices) if len(set(prices)) == 1 else max(cost, min(prices) if serves_any else 0.0)
    return replace(placement, lower_bound_gpus=gpus, lower_bound_cost_per_hour=least)


def _bound_full_batches(problem: Problem, segments: Segments, rates: Mapping[str, float], limit: Limit) -> float:
    """Return the minimum cost of rates in full batches, over the models evaluated in time."""
    per_rps: dict[str, float] = {}
    with problem.limits.until(limit), suppress(TimeUpError):
        for model in rates:
            first = segments.first_alike(model)
            if first not in per_rps:
                per_rps[first] = min(_costs_per_rps(problem, segments, problem.demand(first)), default=0.0)
    return math.fsum(rate * per_rps.get(segments.first_alike(model), 0.0) for model, rate in rates.items())


def with_least_bound(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with its own bound or, if higher, the cheapest device's price where it serves anything."""
    serves_any = any(rate > 0.0 for rate in placement.rates_rps().values())
    least = min(entry.price_per_hour for entry in problem.fleet.entries) if serves_any else 0.0
    return replace(
        placement,
        lower_bound_gpus=max(placement.lower_bound_gpus or 0, int(serves_any)),
        lower_bound_cost_per_hour=max(placement.lower_bound_cost_per_hour or 0.0, least),
    )


def _costs_per_rps(problem: Problem, segments: Segments, demand: Demand) -> Iterator[float]:
    """Yield the minimum cost of a request per second under each share of each kind of device."""
    few = len(problem.demands) <= _MOST_DEMANDS
    for entry in problem.fleet.entries:
        device = entry.device
        listed = problem.estimator.shares(demand.model, device)
        migs = dict.fromkeys((None, *(share.mig for share in listed))) if few else (None,)
        between = (Share(pct, mig) for mig in migs for pct in segments.search_space.steps(demand.model, device, mig))
        for share in (*listed, *between):
            most = max(_throughput_bounds(segments, demand, entry, share), default=0.0)
            if most > 0.0:
                # Assumes that the smallest part of an instance does as much as the whole: unattainable, and so a bound.
                part = 1.0 if few or share.mig is None else PARTS[0] / 100.0
                yield entry.price_per_hour * device.fraction(share) * part / most


def _throughput_bounds(segments: Segments, demand: Demand, entry: FleetEntry, share: Share) -> Iterator[float]:
    """Yield upper bounds of the rate of replicas under ``share``, for each batch up to the next listed batch."""
    listed = segments.search_space.listed_batches(demand.model, entry.device, share)
    dense = segments.search_space.is_dense(demand.model, entry.device, share)
    sizes = sorted({1, *listed}) if dense else listed
    for batch, larger in zip(sizes, (*sizes[1:], 0), strict=False):
        for processes in segments.search_space.processes(share):
            try:
                most = segments.throughput_rps(entry.device, Workload(demand.model, batch, share, processes))
            except InputError:
                continue
            yield most * (max(1.0, (larger - 1) / batch) if dense else 1.0)
