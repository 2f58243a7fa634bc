"""Adapts any policy to the pooled queue that the router forms of all replicas of a model."""

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

#: Plans that are tried with lower rates, at most.
_ROUNDS = 8
#: A model whose replicas serve no more than this times what is asked for is planned for as it is.
_SPARE = 1.01
#: Largest multiple of the asked rates that is searched.
_MOST = 16.0


class _InnerPolicy(Protocol):
    def place(self, problem: Problem) -> Placement: ...


@dataclass(frozen=True, slots=True)
class PooledPolicy:
    """Plans by a policy that splits each model's requests into streams of their own, and corrects it for the pool.

    Published policies give each replica a part of the rate and ask whether it keeps the SLO on its own; the router
    sends a request to whichever replica is first, so that the same replicas serve more. The policy is asked again for
    rates that are lower by as much as the pools of its last map could serve more, halfway back where they then served
    too little, and devices that the others can do without are left out. Of all maps the one that serves most is taken,
    and of those the cheapest: never a worse one than the policy's own.
    """

    policy: _InnerPolicy

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises `InputError` with a latency budget, under which there are no queues; and what the policy raises.
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
            demands = tuple(replace(one, rate_rps=planned[one.model]) for one in problem.demands)
            gpus = self.policy.place(replace(problem, demands=demands)).gpus
            tried = _serve_pooled(problem, pools, gpus, limit)
            if _rank(problem, tried) > _rank(problem, best):
                best = tried
        if _rank(problem, best) <= _rank(problem, (split.gpus, split.rates_rps())):
            return split
        found_by = f"pooled queues: {len(best[0])} devices where {split.policy} has {len(split.gpus)} for split streams"
        made = Placement(split.policy, best[0], found_by=found_by, stopped=split.stopped or limit.is_over)
        return with_unplaced(problem, segments, made)


_Served = tuple[Gpus, Mapping[str, float]]


def _serve_pooled(problem: Problem, pools: Pools, gpus: Gpus, limit: Limit) -> _Served:
    """Return the devices with the rates that their pools serve, without those that the others can do without."""
    served = pools.served_rps(gpus)
    left = pools.drop_spare(pools.rerate(gpus, served), limit)
    return drop_idle_replicas(left), served


def _lower_rates(
    problem: Problem, pools: Pools, gpus: Gpus, planned: Mapping[str, float], enough: dict[str, float]
) -> dict[str, float]:
    """Return the rates to plan for next: what pools could serve more is taken off, too little goes halfway back.

    ``enough`` are the least rates by model for which its replicas were enough; they are kept up to date.
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


def _rank(problem: Problem, made: _Served) -> tuple[float, float]:
    """Return what maps are compared by: most requests served, then least cost."""
    gpus, served = made
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in gpus)
    return round(sum(served.values()), 6), -cost
