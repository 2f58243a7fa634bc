"""Serves as much as possible where not everything can be served."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprof.demand import Demand
from gpuprof.placement.master import Choice, DemandClass, Master
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Solution

#: What a later goal may take away from an earlier one, of the rates.
_GIVE = 1e-6


def maximise_goodput(problem: Problem, classes: Sequence[DemandClass], *, fair: bool) -> Choice | None:
    """Return the choice that serves most: of the highest priority first; then the cheapest of those.

    With ``fair`` the smallest served fraction is maximised before the sum, over all priorities.
    """
    master = Master(problem.fleet.entries, classes, partial=True)
    served = master.served_columns()
    if fair:
        _serve_the_least(problem, master, served)
    solution = None
    for level in sorted({demand.priority for demand, _ in served}, reverse=True):
        own = [(demand, column) for demand, column in served if demand.priority == level]
        row = master.program.row(low=0.0)
        for _, column in own:
            master.program.add(column, row, 1.0)
        master.program.recost({column: -1.0 for _, column in own})
        solution = _solve(problem, master)
        if solution is None:
            return None
        total = sum(demand.rate_rps for demand, _ in own)
        master.program.bound_row(row, low=max(0.0, -solution.objective - _GIVE * total))
    if solution is None:
        return None
    master.program.recost(master.costs())
    return master.read(_solve(problem, master) or solution)


def _serve_the_least(problem: Problem, master: Master, served: Sequence[tuple[Demand, int]]) -> None:
    """Maximise the fraction t with served >= t · rate for all demands, and keep it from then on."""
    program = master.program
    least = program.column(0.0, {}, 1.0, integer=False)
    for demand, column in served:
        row = program.row(low=0.0)
        program.add(column, row, 1.0)
        program.add(least, row, -demand.rate_rps)
    program.recost({least: -1.0})
    solution = _solve(problem, master)
    if solution is not None:
        kept = program.row(low=max(0.0, -solution.objective - _GIVE))
        program.add(least, kept, 1.0)


def _solve(problem: Problem, master: Master) -> Solution | None:
    return master.program.solve(time_limit_s=problem.options.time_limit_s, seed=problem.options.seed)
