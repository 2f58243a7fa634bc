"""The incumbent: comparison of placements, and proof of optimality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, board_work, bound_by_work
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.problem import Problem

#: Relative gap to the bound up to which a placement is treated as optimal.
_NEARLY = 1e-3


def objective_value(problem: Problem, placement: Placement) -> tuple[tuple[float, ...], float]:
    """Return the unserved rates and the cost: less is better."""
    return _unserved_by_priority(problem, placement), round(sum_prices(problem, placement.gpus), 9)


def unfairness(problem: Problem, placement: Placement) -> tuple[tuple[float, ...], float]:
    """Return the missing parts of the demands, in falling order, and the cost: less is fairer."""
    missing = {s.model: s.rate_rps / problem.demand(s.model).rate_rps for s in placement.unplaced}
    missing_parts = sorted((round(missing.get(demand.model, 0.0), 3) for demand in problem.demands), reverse=True)
    return tuple(missing_parts), round(sum_prices(problem, placement.gpus), 9)


def is_proven_optimal(problem: Problem, placement: Placement) -> bool:
    """Return whether no placement is better than this one, up to a negligible gap in large fleets."""
    if placement.unplaced:
        served_rps, bound_rps = sum(placement.rates_rps().values()), placement.upper_bound_goodput_rps
        return bound_rps is not None and served_rps >= bound_rps * (1.0 - _NEARLY)
    bound = placement.lower_bound_cost_per_hour
    return bound is not None and sum_prices(problem, placement.gpus) <= bound * (1.0 + _NEARLY) + 1e-9


def raise_bounds(problem: Problem, placement: Placement, bound: float) -> Placement:
    """Return the placement with its lower bounds raised to a bound on the cost of every map."""
    prices = {entry.price_per_hour for entry in problem.fleet.entries}
    cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
    if cost is None or bound <= cost:
        return placement
    if gpus is None:
        return replace(placement, lower_bound_cost_per_hour=bound)
    if len(prices) > 1:
        least_gpus = max(gpus, math.ceil(bound / max(prices) - 1e-6))
        return replace(placement, lower_bound_cost_per_hour=bound, lower_bound_gpus=least_gpus)
    # A bound of 3.2 devices means four; the subtraction allows for the solver's rounding.
    count = math.ceil(bound / min(prices) - 1e-6)
    return replace(placement, lower_bound_cost_per_hour=count * min(prices), lower_bound_gpus=count)


def clip_bounds(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with its bounds clipped to its own cost: neighbours may even speed each other up."""
    if placement.unplaced:
        return placement
    cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
    return replace(
        placement,
        lower_bound_cost_per_hour=None if cost is None else min(cost, sum_prices(problem, placement.gpus)),
        lower_bound_gpus=None if gpus is None else min(gpus, len(placement.gpus)),
    )


def raise_by_work(problem: Problem, placement: Placement) -> Placement:
    """Return a placement of all demands with bounds no lower than the work of the demands on any devices.

    See `gpuprof.domain.estimate`. Work derived from measurements bounds nothing: larger batches may do better.
    """

    def planned_work_ms(model: str, device: Device) -> float | None:
        work = board_work(problem.estimator, model, device)
        return None if work is None or work.source == MEASURED else planned_ms(work, problem.options.confidence)

    rates = {demand.model: demand.rate_rps for demand in problem.demands}
    kinds = [(entry.device, entry.price_per_hour) for entry in problem.fleet.entries]
    bound = bound_by_work(rates, kinds, planned_work_ms)
    if placement.unplaced or not bound.gpus:
        return placement
    cost = max(placement.lower_bound_cost_per_hour or 0.0, bound.cost_per_hour)
    gpus = max(placement.lower_bound_gpus or 0, bound.gpus)
    return clip_bounds(problem, replace(placement, lower_bound_gpus=gpus, lower_bound_cost_per_hour=cost))


def _unserved_by_priority(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Return the unserved rates, by falling priority, to a millionth of the rates; below its floor all is unserved."""
    levels = sorted({demand.priority for demand in problem.demands}, reverse=True)
    missing = dict.fromkeys(levels, 0.0)
    for unplaced in placement.unplaced:
        demand = problem.demand(unplaced.model)
        is_below_minimum = demand.rate_rps - unplaced.rate_rps < (demand.min_goodput_rps or 0.0) * (1.0 - 1e-9)
        missing[demand.priority] += demand.rate_rps if is_below_minimum else unplaced.rate_rps
    total = sum(demand.rate_rps for demand in problem.demands)
    return tuple(round(missing[level] / total, 6) for level in levels)


def sum_prices(problem: Problem, gpus: Sequence[PlacedGpu]) -> float:
    """Return the cost of devices per hour."""
    return sum(problem.entry(gpu.device).price_per_hour for gpu in gpus)
