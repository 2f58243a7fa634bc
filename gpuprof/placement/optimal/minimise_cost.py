"""Minimises the cost of serving all demands, with a lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import CandidateSegments, Choices
from gpuprof.placement.optimal.column_generation import solve_relaxation
from gpuprof.placement.optimal.compact_program import find_cheaper
from gpuprof.placement.optimal.restricted_master import Choice, DemandClass, RestrictedMaster, group_demands
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Solution

#: Number of devices from which a fleet is planned without searching for the last device.
_MANY_DEVICES = 1_000
#: Maximum rounds of evaluating the guesses the bound rests on.
_MOST_ROUNDS = 3
_MANY_DEMANDS = 40


@dataclass(frozen=True, slots=True)
class CostResult:
    """The cheapest choice and the bounds of a search."""

    choice: Choice | None  #: None when the fleet is too small, or nothing was found in time.
    choices: Choices  #: Segments that ``choice`` counts.
    #: ``gpus``, ``cost_per_hour``: lower bounds on the devices and the cost of serving everything; None where it is
    #: unknown whether everything can be served.
    gpus: int | None
    cost_per_hour: float | None


@dataclass(frozen=True, slots=True)
class _Bound:
    """A bound on the cost, the feasibility on the fleet, and the (device, share) the bound rests on, by model."""

    cost: float
    feasible: bool
    used: Mapping[str, Sequence[tuple[str, Share]]]


@dataclass(frozen=True, slots=True)
class _MasterSolution:
    """A master's solution and the bound on its objective; ``is_large``: a single device is negligible.

    Where memory is rounded up (not ``is_exact``), the bound does not hold for every map.
    """

    choice: Choice | None
    cost: float
    bound: float
    feasible: bool
    is_large: bool = False
    is_exact: bool = True


def minimise_cost(problem: Problem, demands: Sequence[Demand], offers: CandidateSegments, limit: Limit) -> CostResult:
    """Return the cheapest choice of segments for ``demands``, with bounds over all segments that could be offered."""
    if not demands:
        return CostResult(None, offers.known_segments(), 0, 0.0)
    choices = counted = offers.known_segments()
    solution = _solve_master(problem, group_demands(demands, choices), limit)
    bound = _bound_cost(problem, demands, choices, offers, solution, limit)
    for _ in range(_rounds(problem)):
        if (
            _is_proven(solution, bound)
            or solution.is_large
            or limit.is_over
            or not _resolve_guesses(problem, offers, bound)
        ):
            break
        choices = offers.known_segments()
        again = _solve_master(problem, group_demands(demands, choices), limit)
        if again.cost < solution.cost:
            solution, counted = again, choices
        bound = _bound_cost(problem, demands, choices, offers, solution, limit)
    if not bound.feasible:
        return CostResult(solution.choice, counted, None, None)
    optimistic = offers.optimistic_segments(demands, guessing=not solution.is_large)
    fewest = _bound_devices(problem, group_demands(demands, optimistic), bound.cost, limit)
    if not (_is_proven(solution, bound) or offers.segments.bounds_any_map or limit.is_over):
        # Patterns round memory up, and the relaxation's patterns need not add up to whole devices.
        choices = offers.known_segments()
        other = find_cheaper(problem, group_demands(demands, choices), solution.cost, limit)
        if other is not None:
            return CostResult(other, choices, fewest, bound.cost)
    return CostResult(solution.choice, counted, fewest, bound.cost)


def bound_relaxed(problem: Problem, demands: Sequence[Demand], offers: CandidateSegments, limit: Limit) -> float:
    """Return a lower bound on the cost of serving ``demands``, from the relaxation alone, which is quick."""
    classes = group_demands(demands, offers.optimistic_segments(demands))
    prices = _prices(problem.fleet.entries)
    master = RestrictedMaster(problem.fleet.entries, classes, relaxed=True)
    return _round_up_to_step(solve_relaxation(master, prices, limit, problem.options.seed)[1], prices)


def find_cheapest(problem: Problem, classes: Sequence[DemandClass], limit: Limit) -> Choice | None:
    """Return the cheapest choice of the segments of ``classes``, None where none serves all; nothing is proven."""
    return _solve_master(problem, classes, limit).choice


def _rounds(problem: Problem) -> int:
    """Return the rounds of evaluating the bound's guesses: with many demands this solves many queues."""
    by_queues = problem.options.latency_budget is None
    return 1 if by_queues and len(problem.demands) > _MANY_DEMANDS else _MOST_ROUNDS


def _resolve_guesses(problem: Problem, offers: CandidateSegments, bound: _Bound) -> bool:
    """Evaluate the guesses the bound rests on; without queueing, all guesses, which is quick."""
    return (
        offers.resolve_guesses(bound.used) if problem.options.latency_budget is None else offers.resolve_all_guesses()
    )


def _solve_master(problem: Problem, classes: Sequence[DemandClass], limit: Limit) -> _MasterSolution:
    """Return the cheapest choice of segments of ``classes``, with a bound holding for them."""
    master, prices = RestrictedMaster(problem.fleet.entries, classes), _prices(problem.fleet.entries)
    first, bound = solve_relaxation(master, prices, limit, problem.options.seed)
    if first is None:
        return _MasterSolution(None, math.inf, bound, feasible=False, is_exact=master.is_exact)
    many = first.objective > _MANY_DEVICES * max(prices.values())
    solution = master.program.solve(
        time_limit_s=limit.left_s,
        seed=problem.options.seed,
        gap=1.0 / _MANY_DEVICES if many else EXACT,
        least_step=_step(prices),
    )
    if solution is None:
        return _MasterSolution(None, math.inf, bound, True, many, master.is_exact)
    # The integer program's bound covers only its own patterns where patterns are generated.
    if not master.generated:
        bound = max(bound, solution.bound)
    bound = _round_up_to_step(bound, prices)
    choice = master.read_solution(solution)
    return _MasterSolution(choice, solution.objective, min(bound, solution.objective), True, many, master.is_exact)


def _bound_cost(
    problem: Problem,
    demands: Sequence[Demand],
    choices: Choices,
    offers: CandidateSegments,
    solution: _MasterSolution,
    limit: Limit,
) -> _Bound:
    """Return a bound over all segments that could be offered, and the shares it rests on."""
    optimistic = offers.optimistic_segments(demands, guessing=not solution.is_large)
    entries = problem.fleet.entries
    same = solution.is_exact and all(found == choices[model] for model, found in optimistic.items())
    if same and (solution.bound >= solution.cost * (1.0 - EXACT) or solution.is_large):
        return _Bound(solution.bound, solution.feasible, {})
    classes, prices = group_demands(demands, optimistic), _prices(entries)
    master = RestrictedMaster(entries, classes, relaxed=True)
    first, bound = solve_relaxation(master, prices, limit, problem.options.seed)
    if first is None:
        return _Bound(bound, False, {})
    bound = max(_round_up_to_step(bound, prices), solution.bound if same else 0.0)
    if bound < solution.cost * (1.0 - EXACT) and not solution.is_large:
        bound = max(bound, _bound_of_whole_devices(problem, master, classes, limit))
    return _Bound(min(_round_up_to_step(bound, prices), solution.cost), True, _used_shares(master, first, optimistic))


def _bound_of_whole_devices(
    problem: Problem, master: RestrictedMaster, classes: Sequence[DemandClass], limit: Limit
) -> float:
    """Return a bound that respects whole devices; with generated patterns, shares are only summed."""
    entries = problem.fleet.entries
    program = (
        RestrictedMaster(entries, classes, summed=True, relaxed=True).program if master.generated else master.program
    )
    step = _step(_prices(entries))
    solution = program.solve(time_limit_s=limit.left_s, seed=problem.options.seed, least_step=step)
    return 0.0 if solution is None else solution.bound


def _is_proven(solution: _MasterSolution, bound: _Bound) -> bool:
    near = 1.0 / _MANY_DEVICES if solution.is_large else EXACT
    return bound.cost >= solution.cost * (1.0 - near) or not bound.feasible


def _prices(entries: Sequence[FleetEntry]) -> dict[str, float]:
    return {entry.device.name: entry.price_per_hour for entry in entries}


def _step(prices: Mapping[str, float]) -> float:
    """Return the unit of which costs are multiples, 0.0 where devices have different prices."""
    return min(prices.values()) if len(set(prices.values())) == 1 else 0.0


def _round_up_to_step(bound: float, prices: Mapping[str, float]) -> float:
    step = _step(prices)
    # Costs are whole multiples of the single price; below a rounding error of the solver nothing is rounded up.
    return step * math.ceil(bound / step - 1e-6) if step else bound


def _used_shares(master: RestrictedMaster, solution: Solution, choices: Choices) -> dict[str, list[tuple[str, Share]]]:
    """Return the devices and shares a relaxed solution takes, by model."""
    return {
        model: [(choices[model][index].device, choices[model][index].share) for index in sorted(indices)]
        for model, indices in master.find_used_segments(solution).items()
    }


def _bound_devices(problem: Problem, classes: Sequence[DemandClass], cost: float, limit: Limit) -> int | None:
    """Return a bound on the number of devices: from the cost where all prices are equal, else by counting devices."""
    entries, seed = problem.fleet.entries, problem.options.seed
    if step := _step(_prices(entries)):
        return math.ceil(cost / step - 1e-6)
    counted = [replace(entry, device=replace(entry.device, price_per_hour=1.0)) for entry in entries]
    first, bound = solve_relaxation(RestrictedMaster(counted, classes, relaxed=True), _prices(counted), limit, seed)
    return None if first is None else math.ceil(bound - 1e-6)
