"""Maximises goodput where not everything can be served, and bounds the goodput of any map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuprof.domain.demand import Demand
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.column_generation import generate_patterns
from gpuprof.placement.optimal.restricted_master import Choice, DemandClass, RestrictedMaster
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Solution

#: Part of the rates a later goal may take away from an earlier goal.
_GIVE = 1e-6
#: Part of its rate by which a demand must exceed the worst-served demand to be treated as better served.
_BETTER = 1e-3
_Served = Sequence[tuple[Demand, int]]


def maximise_goodput(problem: Problem, classes: Sequence[DemandClass], limit: Limit, *, fair: bool) -> Choice | None:
    """Return the choice with the most goodput, higher priorities first, then the least cost; None if out of time.

    ``fair``: first maximise the smallest served fraction, then the next smallest and so on, over all priorities.
    """
    master = RestrictedMaster(problem.fleet.entries, classes, partial=True)
    solution = _solve_by_priority(problem, master, limit, fair=fair)
    return None if solution is None else master.read_solution(solution)


def _solve_by_priority(problem: Problem, master: RestrictedMaster, limit: Limit, *, fair: bool) -> Solution | None:
    """Return the solution serving most of the highest priority, then of the next with that, and so on.

    Patterns are generated for the objective of each priority, once the higher priorities are held at their optimum.
    """
    columns = master.served_columns()
    if fair:
        _maximise_minima(problem, master, columns, limit)
    solution = None
    for level in sorted({demand.priority for demand, _ in columns}, reverse=True):
        level_columns = [(demand, column) for demand, column in columns if demand.priority == level]
        row = master.program.row(low=0.0)
        for _, column in level_columns:
            master.program.add(column, row, 1.0)
        master.program.recost({column: -1.0 for _, column in level_columns})
        generate_patterns(master, limit, problem.options.seed)
        next_solution = _solve_program(problem, master, limit)
        if next_solution is None:
            break
        solution = next_solution
        total = sum(demand.rate_rps for demand, _ in level_columns)
        master.program.bound_row(row, low=max(0.0, -next_solution.objective - _GIVE * total))
    if solution is None:
        return None
    master.program.recost(master.device_costs({e.device.name: e.price_per_hour for e in problem.fleet.entries}))
    return _solve_program(problem, master, limit) or solution


def bound_goodput(problem: Problem, demands: Sequence[Demand], classes: Sequence[DemandClass], limit: Limit) -> float:
    """Return an upper bound on the rate (requests/s) that any map on the fleet serves within the SLOs.

    The bound ignores fairness and priorities. Where patterns are too many to list, only the sum of shares is bounded,
    which can only raise the bound.

    Parameters
    ----------
    demands : sequence of Demand
        Demands with a segment.
    classes : sequence of DemandClass
        Of the same demands, with their optimistic segments.
    """
    total = math.fsum(demand.rate_rps for demand in demands)
    if not demands:
        return 0.0
    master = RestrictedMaster(problem.fleet.entries, classes, partial=True, summed=True, floors=False, relaxed=True)
    master.program.recost({column: -1.0 for _, column in master.served_columns()})
    # Not stopped by the limit: this short solve gives the only sure bound.
    first = master.program.solve(relaxed=True, seed=problem.options.seed)
    if first is None or not first.is_proven:
        return total
    solution = _solve_program(problem, master, limit)
    least = first.objective if solution is None else max(first.objective, solution.bound)
    return min(total, -least * (1.0 + 1e-9))


def _maximise_minima(problem: Problem, master: RestrictedMaster, columns: _Served, limit: Limit) -> None:
    """Maximise the smallest served fraction, then the next, and keep each from then on (leximin)."""
    open_columns: _Served = list(columns)
    while open_columns:
        least = _serve_the_least(problem, master, open_columns, limit)
        if least is None or least >= 1.0 - _BETTER:
            return
        open_columns = _raise_served(problem, master, open_columns, least, limit)
        if limit.is_over:
            return


def _serve_the_least(problem: Problem, master: RestrictedMaster, columns: _Served, limit: Limit) -> float | None:
    """Maximise the fraction t with served >= t · rate for these demands, keep it, and return it."""
    program = master.program
    least = program.column(0.0, {}, 1.0, integer=False)
    for demand, column in columns:
        row = program.row(low=0.0)
        program.add(column, row, 1.0)
        program.add(least, row, -demand.rate_rps)
    program.recost({least: -1.0})
    generate_patterns(master, limit, problem.options.seed)
    solution = _solve_program(problem, master, limit)
    if solution is None:
        return None
    least_row = program.row(low=max(0.0, -solution.objective - _GIVE))
    program.add(least, least_row, 1.0)
    return -solution.objective


def _raise_served(problem: Problem, master: RestrictedMaster, columns: _Served, least: float, limit: Limit) -> _Served:
    """Return the largest set of these demands that can all be served better than the worst, and keep them so."""
    program = master.program
    flags = []
    for demand, column in columns:
        row = program.row(low=0.0)
        program.add(column, row, 1.0)
        raised_rps = min(1.0, least + _BETTER) * demand.rate_rps
        flags.append(program.column(0.0, {row: -raised_rps}, 1.0))
    program.recost(dict.fromkeys(flags, -1.0))
    solution = _solve_program(problem, master, limit)
    if solution is None:
        return []
    improvable = [pair for pair, flag in zip(columns, flags, strict=True) if solution.values[flag] > 0.5]
    for (demand, column), flag in zip(columns, flags, strict=True):
        if solution.values[flag] > 0.5:
            row = program.row(low=(least + _BETTER / 2.0) * demand.rate_rps * (1.0 - _GIVE))
            program.add(column, row, 1.0)
    return improvable


def _solve_program(problem: Problem, master: RestrictedMaster, limit: Limit) -> Solution | None:
    return master.program.solve(time_limit_s=limit.left_s, seed=problem.options.seed)
