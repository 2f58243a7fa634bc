"""The cheapest placement, or on a fleet that is too small the one of most goodput, with a bound that proves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.demand import Demand
from gpuprof.placement.cover import MOST_REPLICAS, Cover, shared_out
from gpuprof.placement.ffd import FirstFitDecreasing
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.goodput import maximise_goodput
from gpuprof.placement.master import Choice, Master, classes_of
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT
from gpuprof.placement.realise import realise
from gpuprof.placement.segment import RATE_PRECISION, Segment, Segments
from gpuprof.placement.whynot import with_unplaced

#: Of a fleet of so many devices, a part is placed without searching for the last device.
_MANY_DEVICES = 1_000

_Choices = Mapping[str, tuple[Segment, ...]]


@dataclass(frozen=True, slots=True)
class Optimal:
    """Decides batch, processes, replicas, shares and places together, by the integer program `Master`.

    Of every share the segment of largest capacity is considered; that is enough, since what a share costs does not
    depend on what runs in it. Demands that can all be met are met at the least cost; else as much as possible is
    served, higher priorities first, and that at the least cost. The lower bounds hold for every placement over the
    shares, batches and processes that the estimator knows. Interference and memory among models that share a device
    whole are seen when the chosen segments are put on devices; where they do not fit as planned, what is over goes
    elsewhere, and the result is then above the bound, or first-fit decreasing's where that is cheaper.

    Attributes
    ----------
    fair : bool
        Where not everything can be served, serve the least-served demand first: maximise the smallest served
        fraction, then the goodput.
    """

    fair: bool = False

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`."""
        segments = Segments(problem)
        choices = _choices(problem, segments)
        demands = [_within_reach(d, choices[d.model]) for d in problem.demands if choices[d.model]]
        choice, bounds = _cheapest(problem, demands, choices)
        if choice is None and demands:
            choice = maximise_goodput(problem, classes_of(demands, choices), fair=self.fair)
        bins = FleetBins(problem, segments)
        covers = {} if choice is None else _covers(demands, choices, choice)
        left = realise(covers, () if choice is None else choice.patterns, segments, bins)
        return _better(problem, _finished(problem, segments, bins, bounds), bool(left) or choice is None, self.fair)


def _choices(problem: Problem, segments: Segments) -> _Choices:
    return {
        demand.model: tuple(
            segment for entry in problem.fleet.entries for segment in segments.best(demand, entry.device)
        )
        for demand in problem.demands
    }


def _within_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand lowered to what its allowed number of replicas can serve at most."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    reach = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= reach else replace(demand, rate_rps=reach)


def _cheapest(
    problem: Problem, demands: Sequence[Demand], choices: _Choices
) -> tuple[Choice | None, tuple[int | None, float | None]]:
    """Return the cheapest way to serve everything, None when the fleet is too small, and the bounds on it."""
    if not demands:
        return None, (0, 0.0)
    options = problem.options
    master = Master(problem.fleet.entries, classes_of(demands, choices))
    gap = _gap(problem, master)
    solution = master.program.solve(time_limit_s=options.time_limit_s, seed=options.seed, gap=gap)
    if solution is None:
        return None, (None, None)
    cost = solution.objective if solution.proven and gap == EXACT else solution.bound
    if options.latency_budget is None:
        cost = min(cost, _bound_over_precision(problem, demands, choices))
    return master.read(solution), (_fewest_gpus(problem, master, cost), cost)


def _gap(problem: Problem, master: Master) -> float:
    """Return how far from the bound the search may stop: nowhere, but where one device is next to nothing."""
    relaxed = master.program.solve(relaxed=True)
    dearest = max(entry.price_per_hour for entry in problem.fleet.entries)
    many = relaxed is not None and relaxed.objective > _MANY_DEVICES * dearest
    return 1.0 / _MANY_DEVICES if many else EXACT


def _bound_over_precision(problem: Problem, demands: Sequence[Demand], choices: _Choices) -> float:
    """Return the bound on the cost if every capacity were as high as the search for it leaves open."""
    rates = {demand.model: demand.rate_rps for demand in demands}
    wider = {
        model: tuple(_widened(segment, rates[model]) for segment in segments)
        for model, segments in choices.items()
        if model in rates
    }
    program = Master(problem.fleet.entries, classes_of(demands, wider)).program
    solution = program.solve(time_limit_s=problem.options.time_limit_s, seed=problem.options.seed)
    return 0.0 if solution is None else solution.bound


def _widened(segment: Segment, rate_rps: float) -> Segment:
    return replace(segment, capacity_rps=min(rate_rps, segment.capacity_rps * (1.0 + RATE_PRECISION)))


def _fewest_gpus(problem: Problem, master: Master, cost: float) -> int | None:
    """Return a bound on the number of devices: from the cost where they cost the same, else from the relaxation."""
    prices = {entry.price_per_hour for entry in problem.fleet.entries}
    if len(prices) == 1:
        return math.ceil(cost / prices.pop() - 1e-6)
    return None


def _covers(demands: Sequence[Demand], choices: _Choices, choice: Choice) -> dict[str, Cover]:
    covers = {}
    for demand in demands:
        counts = choice.covers[demand.model]
        chosen = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if chosen:
            covers[demand.model] = shared_out(demand.rate_rps, chosen)
    return covers


def _finished(
    problem: Problem, segments: Segments, bins: FleetBins, bounds: tuple[int | None, float | None]
) -> Placement:
    return with_unplaced(problem, segments, Placement("optimal", bins.placed(), (), *bounds))


def _better(problem: Problem, found: Placement, doubtful: bool, fair: bool) -> Placement:
    """Return first-fit decreasing's placement where the program's could not be put down and that one is better."""
    if not doubtful or fair:
        return found
    other = FirstFitDecreasing().place(problem)
    worth = {id(one): (_missing(problem, one), _cost(problem, one)) for one in (found, other)}
    if worth[id(other)] >= worth[id(found)]:
        return found
    return replace(found, gpus=other.gpus, unplaced=other.unplaced)


def _missing(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Return what is not served, by falling priority, to a millionth of the rates."""
    levels = sorted({demand.priority for demand in problem.demands}, reverse=True)
    missing = dict.fromkeys(levels, 0.0)
    for one in placement.unplaced:
        missing[problem.demand(one.model).priority] += one.rate_rps
    total = sum(demand.rate_rps for demand in problem.demands)
    return tuple(round(missing[level] / total, 6) for level in levels)


def _cost(problem: Problem, placement: Placement) -> float:
    return sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
