"""Column generation: patterns of partitions that are too many to list are found by pricing.

The relaxation's duals price a slot of every size. The pricing problem is a knapsack over shares, and over memory too
where memory counts. Its best pattern enters the program when it is worth more than its partition costs. When no pattern
does, the relaxation is solved over all patterns.
Before that, and after a time limit, the duals still give a bound (Farley 1990, "A note on bounding a class of linear
programming problems": dual prices scaled down until no column beats its cost are feasible in the dual).
"""

from __future__ import annotations

import math

from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.pattern import PartitionKind
from gpuprof.placement.optimal.restricted_master import RestrictedMaster
from gpuprof.placement.program import EXACT, Solution


def solve_relaxation(
    master: RestrictedMaster, prices: dict[str, float], limit: Limit, seed: int = 0
) -> tuple[Solution | None, float]:
    """Solve the relaxation, adding patterns to ``master`` until none improves it or the time is up.

    Parameters
    ----------
    master : Master
        Its objective is the price of the devices.
    prices : mapping of str to float
        By device.

    Returns
    -------
    (Solution or None, float)
        None where the program has no solution with its present patterns; and a lower bound on every solution over all
        patterns.
    """
    best, solution = 0.0, None
    while True:
        # The first solve is not stopped: without it there is no bound at all, and it is short beside the others.
        left = None if solution is None else limit.left_s
        next_solution = master.program.solve(relaxed=True, time_limit_s=left, seed=seed)
        if next_solution is None or not next_solution.is_proven:
            return solution, best
        solution = next_solution
        values = {kind: _pattern_value(master, kind, next_solution) for kind in master.kind_rows}
        # The bound of a round is not monotone: an earlier bound may be higher, and all of them hold.
        best = max(best, farley_bound(master, prices, next_solution, values))
        if limit.is_over or not _add_columns(master, next_solution, values):
            return solution, best


def generate_patterns(master: RestrictedMaster, limit: Limit, seed: int = 0) -> None:
    """Add the patterns of the program's relaxation under its present objective, until the time is up."""
    while master.generated:
        solution = master.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=seed)
        if solution is None or not solution.is_proven or limit.is_over:
            return
        values = {kind: _pattern_value(master, kind, solution) for kind in master.kind_rows}
        if not _add_columns(master, solution, values):
            return


def farley_bound(
    master: RestrictedMaster, prices: dict[str, float], solution: Solution, values: dict[PartitionKind, float]
) -> float:
    """Return the bound on the cost that a relaxed solution's duals give.

    Each partition is priced at the worth of its best pattern. All duals are then scaled down by the factor that leaves
    no configuration of a device worth more than its price. Columns of covers cost nothing and stay feasible.
    """
    scale = 1.0
    for configuration, dual in master.configuration_duals(solution.duals):
        value = (
            sum(
                n * max(values[kind], solution.duals[master.kind_rows[kind]])
                for kind, n in configuration.partitions().items()
            )
            + dual
        )
        if value > prices[configuration.device]:
            scale = min(scale, prices[configuration.device] / value)
    return max(0.0, scale * solution.objective)


def _pattern_value(master: RestrictedMaster, kind: PartitionKind, solution: Solution) -> float:
    """Return the worth of a partition's best pattern; 0.0 where all patterns are listed and its dual suffices."""
    if kind not in master.generated:
        return 0.0
    return master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))[1]


def _add_columns(master: RestrictedMaster, solution: Solution, values: dict[PartitionKind, float]) -> bool:
    """Add the patterns that are worth more than their partition costs; return whether there were any."""
    has_new = False
    for kind in sorted(master.generated, key=str):
        cost = solution.duals[master.kind_rows[kind]]
        if values[kind] > cost + EXACT * max(1.0, math.fabs(cost)):
            pattern, _ = master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))
            has_new = master.add_pattern(pattern) or has_new
    return has_new
