"""A lower bound on the cost that needs no queues: what the demands take of devices that are always busy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.menu import PARTS
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments


def with_cost_bound(problem: Problem, segments: Segments, placement: Placement) -> Placement:
    """Return the placement with bounds for whatever serves as much of the demands.

    No request costs less than in full batches under the share that does most for its price. Parts of an instance are
    regarded where the whole serves a demand, as if the smallest part did.
    """
    rates = placement.rates_rps()
    prices = [entry.price_per_hour for entry in problem.fleet.entries]
    cost = math.fsum(
        min(_costs(problem, segments, demand, rates[demand.model]), default=0.0)
        for demand in problem.demands
        if demand.model in rates
    )
    gpus = math.ceil(cost / max(prices) - 1e-6)
    least = gpus * min(prices) if len(set(prices)) == 1 else cost
    return replace(placement, lower_bound_gpus=gpus, lower_bound_cost_per_hour=least)


def _costs(problem: Problem, segments: Segments, demand: Demand, rate_rps: float) -> Iterator[float]:
    """Yield what ``rate_rps`` costs at least under each share of each kind of device."""
    for entry in problem.fleet.entries:
        device, steps = entry.device, segments.menu.steps(demand.model, entry.device, None)
        for share in (*problem.estimator.shares(demand.model, device), *map(Share, steps)):
            most = max(_throughput_bounds(segments, demand, entry, share), default=0.0)
            if most <= 0.0:
                continue
            needed = rate_rps / most
            if share.mig is not None and needed <= 1.0:
                needed = min(needed, PARTS[0] / 100.0)
            yield entry.price_per_hour * device.fraction(share) * needed


def _throughput_bounds(segments: Segments, demand: Demand, entry: FleetEntry, share: Share) -> Iterator[float]:
    """Yield requests/s that no replica under ``share`` exceeds, for each batch up to the next that is listed."""
    listed = segments.menu.listed_batches(demand.model, entry.device, share)
    dense = segments.menu.is_dense(demand.model, entry.device, share)
    sizes = sorted({1, *listed}) if dense else listed
    for batch, larger in zip(sizes, (*sizes[1:], 0), strict=True):
        for processes in segments.menu.processes(share):
            try:
                most = segments.throughput_rps(entry.device, Workload(demand.model, batch, share, processes))
            except InputError:
                continue
            yield most * (max(1.0, (larger - 1) / batch) if dense else 1.0)
