"""The map of the integer program, which chooses segments and devices together without interference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.placement.cover import MOST_REPLICAS, Cover, share_out_rate
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import CandidateSegments, Choices
from gpuprof.placement.optimal.goodput import bound_goodput, maximise_goodput
from gpuprof.placement.optimal.merge_replicas import merge_replicas
from gpuprof.placement.optimal.minimise_cost import find_cheapest, minimise_cost
from gpuprof.placement.optimal.packing import pack_replicas
from gpuprof.placement.optimal.restricted_master import Choice, group_demands
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Maximum number of demands: with more, the bound takes longer than a quick map.
MOST_BOUNDED = 20


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The program's placement, whether all chosen segments were placed, and the program's demands."""

    placement: Placement
    whole: bool
    demands: tuple[Demand, ...]


def plan_by_program(problem: Problem, segments: Segments, limit: Limit, *, fair: bool) -> ProgramPlan:
    """Return the program's placement with its bounds.

    Parameters
    ----------
    problem : Problem
    segments : Segments
        Of the same problem.
    limit : Limit
    fair : bool
        As `gpuprof.placement.optimal.optimal.Optimal`.
    """
    offers = CandidateSegments(problem, segments)
    choices = offers.known_segments()
    demands = [_lower_to_reach(d, choices[d.model]) for d in problem.demands if choices[d.model]]
    result = minimise_cost(problem, demands, offers, limit)
    choice, choices = result.choice, result.choices
    if choice is None and demands and not limit.is_over:
        if problem.options.latency_budget is not None:
            offers.resolve_all_guesses()
        choices = offers.listed_segments()
        choice = maximise_goodput(problem, group_demands(demands, choices), limit, fair=fair)
    gpus, whole = _build_placement(problem, segments, choices, _make_covers(demands, choices, choice), choice)
    placed = Placement("optimal", gpus, (), result.gpus, result.cost_per_hour)
    if all(entry.count is not None for entry in problem.fleet.entries):
        most = sum(demand.rate_rps for demand in demands)
        if result.choice is None:
            most = bound_goodput(problem, demands, group_demands(demands, offers.optimistic_segments(demands)), limit)
        placed = replace(placed, upper_bound_goodput_rps=most)
    return ProgramPlan(with_unplaced(problem, segments, placed), whole, tuple(demands))


def place_by_program(
    problem: Problem, segments: Segments, demands: Sequence[Demand], limit: Limit, *, fair: bool
) -> tuple[PlacedGpu, ...]:
    """Return the devices the program takes for some demands, without a bound.

    Parameters
    ----------
    problem : Problem
    segments : Segments
        Of the same problem.
    demands : sequence of Demand
        Demands of models of the problem, at any rates.
    limit : Limit
    fair : bool
    """
    choices = CandidateSegments(problem, segments).known_segments()
    able = [_lower_to_reach(one, choices[one.model]) for one in demands if choices[one.model]]
    classes = group_demands(able, choices)
    choice = find_cheapest(problem, classes, limit) or maximise_goodput(problem, classes, limit, fair=fair)
    return _build_placement(problem, segments, choices, _make_covers(able, choices, choice), choice)[0]


def _lower_to_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand lowered to the maximum rate of its allowed number of replicas."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    reach = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= reach else replace(demand, rate_rps=reach)


def _build_placement(
    problem: Problem, segments: Segments, choices: Choices, covers: Mapping[str, Cover], choice: Choice | None
) -> tuple[tuple[PlacedGpu, ...], bool]:
    """Return the devices a choice takes, and whether all chosen segments were placed."""
    bins = FleetBins(problem, segments)
    left = choice is None or pack_replicas(covers, choice, segments, bins)
    return merge_replicas(problem, segments, choices, bins.to_gpus()), not left


def _make_covers(demands: Sequence[Demand], choices: Choices, choice: Choice | None) -> dict[str, Cover]:
    covers: dict[str, Cover] = {}
    for demand in demands:
        if choice is None:
            break
        counts = choice.covers[demand.model]
        chosen = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if chosen:
            covers[demand.model] = share_out_rate(demand.rate_rps, chosen)
    return covers
