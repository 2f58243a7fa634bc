"""Adapts any policy to the pooled queue the router forms of all replicas of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gpuprof.errors import InputError
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import Placement
from gpuprof.placement.pool import Gpus, Pools, drop_idle_replicas
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Maximum number of plans with lower rates.
_ROUNDS = 8
#: Ratio of the served to the demanded rate up to which a model's planned rate is kept.
_SPARE = 1.01
#: Largest searched multiple of the demanded rates.
_MOST = 16.0


class _InnerPolicy(Protocol):
    def place(self, problem: Problem) -> Placement: ...


@dataclass(frozen=True, slots=True)
class PooledPolicy:
    """Plans by a policy that splits each model's requests into separate streams, corrected for the pool.

    Published policies give each replica a part of the rate and check its SLO alone; the router sends a request to the
    first free replica, so the same replicas serve more. The policy is run again for rates reduced by the spare capacity
    of its last map's pools, halfway back where pools then served too little, and dispensable devices are dropped. The
    map serving most is returned, the cheapest among equals: never worse than the policy's own map.
    """

    policy: _InnerPolicy

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises `InputError` with a latency budget, which excludes queueing; and the policy's own errors.
        """
        if problem.options.latency_budget is not None:
            raise InputError("pooled queues need an SLO that counts waiting", "leave out --latency-budget, or pooled")
        limit = Limit(problem.options.time_limit_s)
        split = self.policy.place(problem)
        segments = Segments(problem)
        pools = Pools(problem, segments)
        best = _serve_pooled(problem, pools, split.gpus, limit)
        planned = {demand.model: demand.rate_rps for demand in problem.demands}
        enough = dict(planned)
        gpus = split.gpus
        for _ in range(_ROUNDS):
            lower = _lower_rates(problem, pools, gpus, planned, enough)
            if limit.is_over or lower == planned:
                break
            planned = lower
            demands = tuple(replace(demand, rate_rps=planned[demand.model]) for demand in problem.demands)
            gpus = self.policy.place(replace(problem, demands=demands)).gpus
            candidate = _serve_pooled(problem, pools, gpus, limit)
            if _rank(problem, candidate) > _rank(problem, best):
                best = candidate
        if _rank(problem, best) <= _rank(problem, (split.gpus, split.rates_rps())):
            return split
        found_by = f"pooled queues: {len(best[0])} devices where {split.policy} has {len(split.gpus)} for split streams"
        placement = Placement(split.policy, best[0], found_by=found_by, stopped=split.stopped or limit.is_over)
        return with_unplaced(problem, segments, placement)


_Served = tuple[Gpus, Mapping[str, float]]


def _serve_pooled(problem: Problem, pools: Pools, gpus: Gpus, limit: Limit) -> _Served:
    """Return the devices with the rates that their pools serve, without dispensable devices."""
    rates = pools.served_rps(gpus)
    left = pools.drop_spare(pools.rerate(gpus, rates), limit)
    return drop_idle_replicas(left), rates


def _lower_rates(
    problem: Problem, pools: Pools, gpus: Gpus, planned: Mapping[str, float], enough: dict[str, float]
) -> dict[str, float]:
    """Return the next planned rates: reduced by a pool's spare capacity, or halfway back after a shortfall.

    ``enough``: the least sufficient planned rates by model; updated in place.
    """
    servers, rates = pools.servers(gpus), dict(planned)
    for demand in problem.demands:
        model, pool = demand.model, servers.get(demand.model, Counter())
        most = pools.most_rps(demand, pool, _MOST * demand.rate_rps)
        if most < demand.rate_rps:
            rates[model] = math.sqrt(planned[model] * enough[model])
        else:
            enough[model] = planned[model]
            if most > _SPARE * demand.rate_rps:
                rates[model] *= demand.rate_rps / most
    return rates


def _rank(problem: Problem, candidate: _Served) -> tuple[float, float]:
    """Return the ranking of maps: most requests served, then least cost."""
    gpus, rates = candidate
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in gpus)
    return round(sum(rates.values()), 6), -cost
