"""Maps under the queueing model, made from maps at half the SLO, which are quick to make.

A replica whose batches take less than half the SLO mostly answers in time while its load is moderate. The acceptable
load differs by demand: each demand is planned for its rate times a factor of its own. The factor is raised where a
replica is too slow and lowered where no replica is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.errors import GpuprofError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.policies import make_policy
from gpuprof.placement.pool import Gpus
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Part of the SLO a batch may take in the maps.
_BUDGET = 0.5
#: Name of the rule that finds the maps.
FOUND_BY = "half of the SLO, judged by queues"
#: Initial, minimum and maximum factor on the rate of a demand.
_FIRST, _LEAST, _MOST = 1.7, 1.02, 4.0
#: Step by which a factor is raised, and the ratio to an insufficient factor below which it is not lowered.
_STEP, _NEAR = 1.15, 1.03
_MOST_ROUNDS = 12


@dataclass(slots=True)
class _RateFactor:
    """The planned factor on the rate of a demand, with the largest insufficient and the smallest sufficient factor."""

    now: float = _FIRST
    little: float = _LEAST
    enough: float = math.inf

    def raise_(self) -> None:
        """Mark the planned factor as too small."""
        self.little = max(self.little, self.now)
        if self.enough <= self.little:  # neighbours have changed
            self.enough = math.inf
        self.now = min(_MOST, self.now * _STEP, self.enough)

    def lower(self) -> None:
        """Mark the planned factor as sufficient, and try a smaller one."""
        self.enough = min(self.enough, self.now)
        self.little = min(self.little, self.enough)
        if self.enough > self.little * _NEAR:
            self.now = math.sqrt(self.little * self.enough)


@dataclass(slots=True)
class BudgetPlans:
    """Makes the maps of a problem."""

    problem: Problem  #: Without a latency budget.
    segments: Segments  #: Segments of the same problem.
    policy: str = "igniter"  #: Name of the policy that makes the maps.
    _factors: dict[str, _RateFactor] = field(init=False)

    def __post_init__(self) -> None:
        self._factors = {demand.model: _RateFactor() for demand in self.problem.demands}

    def find_cheapest(self, limit: Limit) -> Gpus | None:
        """Return the cheapest map found in time, None without a map."""
        found = None
        with self.problem.limits.until(limit), suppress(TimeUpError):
            for cheaper in self.plan(limit):
                found = cheaper
        return found

    def plan(self, limit: Limit) -> Iterator[Gpus]:
        """Yield maps whose replicas serve all demands in time, until the time is up or factors have settled."""
        best = math.inf
        for _ in range(_MOST_ROUNDS):
            gpus = None if limit.is_over else self._plan_once()
            if gpus is None:
                return
            late = self._find_late(gpus)
            if not late:
                cost = sum(self.problem.entry(gpu.device).price_per_hour for gpu in gpus)
                if cost < best:
                    best = cost
                    yield gpus
            for model, factor in self._factors.items():
                if model in late:
                    factor.raise_()
                elif not late:
                    factor.lower()

    def _find_late(self, gpus: Gpus) -> set[str]:
        """Return the models with a replica that is too slow for its own part of the requests."""
        late = set()
        for gpu in gpus:
            device = self.problem.device(gpu.device)
            for partition in gpu.partitions:
                for one in partition.replicas:
                    demand, beside = self.problem.demand(one.model), partition.beside(one)
                    if one.model not in late and not self.segments.meets(
                        demand, device, one.workload, one.rate_rps, beside
                    ):
                        late.add(one.model)
        return late

    def _plan_once(self) -> Gpus | None:
        """Return a map at half the SLO for the demands times their factors, with the demands' own rates."""
        factors = {model: factor.now for model, factor in self._factors.items()}
        options = replace(self.problem.options, latency_budget=_BUDGET, time_limit_s=None)
        demands = tuple(replace(one, rate_rps=one.rate_rps * factors[one.model]) for one in self.problem.demands)
        asked = replace(self.problem, demands=demands, options=options, previous=None, alike={})
        try:
            placement = make_policy(self.policy).place(asked)
        except GpuprofError:
            return None
        return None if placement.unplaced else tuple(_scale_rates(gpu, factors) for gpu in placement.gpus)


def _scale_rates(gpu: PlacedGpu, factors: Mapping[str, float]) -> PlacedGpu:
    def scale(partition: PlacedPartition) -> PlacedPartition:
        replicas = (replace(one, rate_rps=one.rate_rps / factors[one.model]) for one in partition.replicas)
        return replace(partition, replicas=tuple(replicas))

    return replace(gpu, partitions=tuple(map(scale, gpu.partitions)))
