"""Maps whose replicas share the requests of their model through the router.

The program counts the rate of each replica as its own. Here rates are those of replicas in a pool: first segments with
the rate of a replica among as many as serve a demand together, then the whole map verified by the queue of each model's
pool, repaired where it is too slow, and relieved of dispensable devices. The maximum rate of a replica, alone or in a
pool, gives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cost_bound import with_cost_bound, with_least_bound
from gpuprof.placement.optimal.equal_replicas import EqualReplicas
from gpuprof.placement.optimal.goodput import bound_goodput
from gpuprof.placement.optimal.incumbent import clip_bounds, is_proven_optimal, objective_value, unfairness
from gpuprof.placement.optimal.minimise_cost import minimise_cost
from gpuprof.placement.optimal.restricted_master import group_demands
from gpuprof.placement.optimal.warm_start import keep_previous_gpus
from gpuprof.placement.placement import Placement
from gpuprof.placement.pool import Gpus, Pools, drop_idle_replicas
from gpuprof.placement.pooled_segment import BoundingSegments, PooledSegments
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Maximum number of repeated solves for demands whose replicas are together too slow.
_MOST_REPAIRS = 4
#: Factor on the missing rate by which a demand is then raised.
_MORE = 1.01

#: Solves the program of some segments for demands at these rates, and returns the devices.
ProgramSolver = Callable[[PooledSegments, Mapping[str, float]], Gpus]


@dataclass(slots=True)
class PooledPlanner:
    """Plans maps for pooled queues."""

    problem: Problem  #: Without a latency budget.
    segments: Segments  #: Segments of the same problem, for replicas with streams of their own.
    limit: Limit
    fair: bool = False  #: Fairness, as in `gpuprof.placement.optimal.optimal.Optimal`.
    pools: Pools = field(init=False)
    _least: tuple[int, float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pools = Pools(self.problem, self.segments)

    def settle(self, split: Placement) -> Placement:
        """Return a map for split streams at the rates of its pools, without dispensable devices."""
        with self.problem.limits.until(self.limit), suppress(TimeUpError):
            return self._settle(split, split.gpus, str(split.found_by or ""))
        return split

    def bound(self, split: Placement, limit: Limit) -> Placement | None:
        """Return a map for split streams, settled, with bounds found in time; None if it leaves demand unplaced.

        A map as cheap as the cheapest device alone needs no further bound.
        """
        best = replace(self.settle(split), upper_bound_goodput_rps=self._all_rps())
        if best.unplaced:
            return None
        best = with_least_bound(self.problem, best)
        if not is_proven_optimal(self.problem, best):
            with self.problem.limits.until(limit), suppress(TimeUpError):
                best = self._bound(best)
        return clip_bounds(self.problem, best)

    def take_over(self, quick: Placement, limit: Limit) -> Placement:
        """Return a policy's map serving everything, settled while there is time, with a bound."""
        named = replace(quick, policy="optimal", found_by=quick.policy)
        with self.problem.limits.until(limit), suppress(TimeUpError):
            settled = self._settle(named, quick.gpus, quick.policy)
            named = named if settled.unplaced else settled
        return clip_bounds(
            self.problem, with_cost_bound(self.problem, self.segments, self._without_bounds(named), limit)
        )

    def plan_equal_replicas(self, limit: Limit) -> Placement | None:
        """Return the map of equal replicas without dispensable devices, with a bound if there is time.

        None where the fleet is too small, or the time is up before a map is found.
        """
        with self.problem.limits.until(limit), suppress(TimeUpError):
            equal = EqualReplicas(self.problem, self.segments, self.pools, limit)
            gpus = equal.place()
            if gpus is not None:
                made = self._settle(Placement("optimal", gpus), equal.drop_devices(gpus), "equal replicas")
                if not made.unplaced:
                    return with_cost_bound(self.problem, self.segments, self._without_bounds(made), limit)
        return None

    def plan(self, split: Placement, solve_program: ProgramSolver) -> Placement:
        """Return the best of a map for split streams without dispensable devices, and the program's maps of pools."""
        if self.limit.is_over:
            free = self._without_bounds(split)
            return clip_bounds(
                self.problem, free if split.unplaced else with_cost_bound(self.problem, self.segments, free, self.limit)
            )
        best = self._without_bounds(split)
        with self.problem.limits.until(self.limit), suppress(TimeUpError):
            best = self._settle(split, split.gpus, str(split.found_by or ""))
            if best.unplaced:
                best = self._without_bounds(best)
            else:
                best = with_cost_bound(self.problem, self.segments, best, self.limit)
            best = self._bound(best)
            for one in self._others(best, solve_program):
                best = self._better(best, one)
        if best.lower_bound_cost_per_hour is None and not best.unplaced:  # the time was up before any bound
            best = with_cost_bound(self.problem, self.segments, best, self.limit)
        return clip_bounds(self.problem, replace(best, stopped=best.stopped or self.limit.is_over))

    def _others(self, best: Placement, solve_program: ProgramSolver) -> Iterator[Placement]:
        if self.problem.previous is not None:
            kept = keep_previous_gpus(self.problem, self.segments, self.problem.previous)
            if kept:
                yield self._settle(best, kept, "what runs already")
        if not is_proven_optimal(self.problem, best) and not self.limit.is_over:
            yield from self._of_program(best, solve_program)
        if self.problem.previous is None and not is_proven_optimal(self.problem, best) and not self.limit.is_over:
            equal = EqualReplicas(self.problem, self.segments, self.pools, self.limit)
            for name, gpus in (("equal replicas", equal.place()), (str(best.found_by or ""), best.gpus)):
                if gpus is not None and not best.unplaced:
                    yield self._settle(best, equal.drop_devices(gpus), name)

    def _without_bounds(self, placement: Placement) -> Placement:
        return replace(
            placement, lower_bound_gpus=None, lower_bound_cost_per_hour=None, upper_bound_goodput_rps=self._all_rps()
        )

    def _all_rps(self) -> float | None:
        fixed = all(entry.count is not None for entry in self.problem.fleet.entries)
        return math.fsum(one.rate_rps for one in self.problem.demands) if fixed else None

    def _settle(self, placement: Placement, gpus: Gpus, name: str) -> Placement:
        """Return the devices at their served rates, up to the demanded rates, without dispensable devices."""
        served = self.pools.served_rps(gpus)
        rated = drop_idle_replicas(self.pools.rerate(gpus, served))
        kept = self.pools.drop_spare(rated, self.limit)
        found = name if len(kept) == len(gpus) else ", ".join(filter(None, (name, "without spare devices")))
        return with_unplaced(
            self.problem, self.segments, replace(placement, gpus=kept, unplaced=(), found_by=found or None)
        )

    def _bound(self, best: Placement) -> Placement:
        """Return the placement with bounds for every map of this router."""
        if self._least is not None and not best.unplaced:
            return self._raise_bounds(best, *self._least)
        bounding = BoundingSegments(self.problem)
        offers = CandidateSegments(self.problem, bounding)
        choices = offers.known_segments()
        able = [one for one in self.problem.demands if choices[one.model]]
        most = self._all_rps()
        if not best.unplaced:
            result = minimise_cost(self.problem, able, offers, self.limit)
            if result.cost_per_hour is None or result.gpus is None:
                return best
            self._least = result.gpus, result.cost_per_hour
            return self._raise_bounds(best, *self._least)
        if most is not None:
            most = bound_goodput(self.problem, able, group_demands(able, offers.optimistic_segments(able)), self.limit)
        return replace(best, upper_bound_goodput_rps=most)

    def _raise_bounds(self, best: Placement, gpus: int, cost: float) -> Placement:
        return replace(
            best,
            lower_bound_gpus=max(gpus, best.lower_bound_gpus or 0),
            lower_bound_cost_per_hour=max(cost, best.lower_bound_cost_per_hour or 0.0),
            upper_bound_goodput_rps=self._all_rps(),
        )

    def _of_program(self, best: Placement, solve_program: ProgramSolver) -> Iterator[Placement]:
        """Yield the program's maps, its demands raised until the chosen replicas serve the demanded rates."""
        known, rates = PooledSegments(self.problem), {one.model: one.rate_rps for one in self.problem.demands}
        for _ in range(_MOST_REPAIRS):
            if self.limit.is_over:
                return
            gpus = solve_program(known, rates)
            if not gpus:
                return
            yield self._settle(best, gpus, "pooled replicas")
            served = self.pools.served_rps(gpus)
            slow = {
                one.model: one.rate_rps / served[one.model]
                for one in self.problem.demands
                if 0.0 < served.get(one.model, 0.0) < one.rate_rps * (1.0 - 1e-9)
            }
            if not slow:
                return
            rates = {model: rate * (_MORE * slow[model] if model in slow else 1.0) for model, rate in rates.items()}

    def _better(self, best: Placement, other: Placement) -> Placement:
        return min(best, other, key=self._rank)

    def _rank(self, placement: Placement) -> tuple[object, ...]:
        worse = (
            unfairness(self.problem, placement)
            if self.fair and placement.unplaced
            else objective_value(self.problem, placement)
        )
        moves = 0
        if self.problem.previous is not None:
            devices = {entry.device.name: entry.device for entry in self.problem.fleet.entries}
            moves = assign_devices(placement.gpus, self.problem.previous, devices).moves
        return bool(placement.unplaced), *worse, moves


def raise_demands(demands: Sequence[Demand], rates: Mapping[str, float]) -> tuple[Demand, ...]:
    """Return the demands at other rates."""
    return tuple(replace(one, rate_rps=rates[one.model]) for one in demands)
