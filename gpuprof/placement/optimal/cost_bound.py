"""The lower bound on the cost of every map: the program over the highest capacities of all shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpuprof.domain.fleet import FleetEntry
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.bound_table import BoundTable
from gpuprof.placement.optimal.column_generation import solve_relaxation
from gpuprof.placement.optimal.restricted_master import DemandClass, RestrictedMaster, group_demands
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT


def bound_by_classes(
    problem: Problem, entries: Sequence[FleetEntry], classes: Sequence[DemandClass], most_cost: float, limit: Limit
) -> tuple[float, Mapping[str, set[int]]]:
    """Return a lower bound on the cost of serving the classes, at most ``most_cost``, and the segments it rests on.

    The relaxation comes first; where it stays below ``most_cost``, the integer program over whole devices, whose shares
    are only summed where their patterns are too many to list.

    Parameters
    ----------
    problem : Problem
    entries : sequence of FleetEntry
    classes : sequence of DemandClass
        With the highest capacities and the least memory of each share.
    most_cost : float
        Of a map; infinite without one.
    limit : Limit
    """
    prices, seed = list_prices(entries), problem.options.seed
    master = RestrictedMaster(entries, classes, relaxed=True)
    solution, bound = solve_relaxation(master, prices, limit, seed)
    if solution is None:
        return min(bound, most_cost), {}
    bound = round_up_to_step(bound, prices)
    if bound >= most_cost * (1.0 - EXACT) or limit.is_over:
        return min(bound, most_cost), master.find_used_segments(solution)
    if master.generated:
        master = RestrictedMaster(entries, classes, summed=True, relaxed=True)
    integral = master.program.solve(time_limit_s=limit.left_s, seed=seed, least_step=find_step(prices))
    if integral is None:
        return bound, {}
    return min(round_up_to_step(max(bound, integral.bound), prices), most_cost), master.find_used_segments(integral)


def bound_by_table(problem: Problem, table: BoundTable, most_cost: float, limit: Limit) -> float:
    """Return a lower bound on the cost of every map under the queueing model, at most ``most_cost``.

    The queues of the replicas that it rests on are solved as long as time allows.
    """
    bound = 0.0
    while True:
        choices = table.list_choices()
        if not all(choices.values()):
            return bound  # nothing is known about some demand
        classes = group_demands(problem.demands, choices)
        least, subsets = bound_by_classes(problem, table.entries, classes, most_cost, limit)
        bound = max(bound, least)
        segments = {model: [choices[model][index] for index in sorted(indices)] for model, indices in subsets.items()}
        if bound >= most_cost * (1.0 - EXACT) or limit.is_over or not table.settle(segments):
            return bound


def list_prices(entries: Sequence[FleetEntry]) -> dict[str, float]:
    """Return the price per hour of each kind of device."""
    return {entry.device.name: entry.price_per_hour for entry in entries}


def find_step(prices: Mapping[str, float]) -> float:
    """Return the unit of which costs are multiples, 0.0 where devices have different prices."""
    return min(prices.values()) if len(set(prices.values())) == 1 else 0.0


def round_up_to_step(bound: float, prices: Mapping[str, float]) -> float:
    """Return the bound, at a single price as a whole number of devices."""
    step = find_step(prices)
    # Costs are whole multiples of the single price; below a rounding error of the solver nothing is rounded up.
    return step * math.ceil(bound / step - 1e-6) if step else bound
