"""Chains of models: their steps as demands, and the division of a chain's SLO among its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import Chain
from gpuprof.errors import InputError
from gpuprof.placement.segment import Segments

if TYPE_CHECKING:
    from gpuprof.placement.problem import Problem

#: Number of equal parts of an SLO that are dealt out to the steps: budgets differ by 5% of the SLO.
_PARTS = 20


def expand_chains(demands: Sequence[Demand]) -> tuple[Sequence[Demand], dict[str, Chain]]:
    """Return the demands with the steps of each chain in its place, each with an equal part of the SLO, and the chains.

    A step is named after its model, or ``CHAIN.MODEL`` where another demand has this name. Of a chain, ``percentile``
    percent of the requests are in time if no step delays more than its part of the others, so the steps' percentile is
    higher (union bound). Demands without chains are returned unchanged.

    Raises `InputError` for a chain with a field that holds for a single model, or a name that is not unique.
    """
    from gpuprof.pipeline.problem import model_name, name_demand

    if not any(demand.steps for demand in demands):
        return demands, {}
    names = {name_demand(demand).model for demand in demands if not demand.steps}
    expanded: list[Demand] = []
    chains: dict[str, Chain] = {}
    for demand in demands:
        if not demand.steps:
            expanded.append(demand)
            continue
        models = [model_name(step) for step in demand.steps]
        chain = name_demand(demand).model
        files = demand.file.split(">") if demand.file else [None] * len(models)
        if demand.dims or not all(demand.steps) or len(files) != len(models):
            raise InputError(
                f"the chain {chain!r} must be MODEL>MODEL, with FILE>FILE in a column file and nothing in dims",
                "--dim gives the sizes of dimensions",
            )
        services, prefix = [], chain.replace(">", "-")
        for step, model, file in zip(demand.steps, models, files, strict=True):
            numbered = (f"{prefix}.{model}.{number}" for number in itertools.count(2))
            service = next(
                name for name in itertools.chain((model, f"{prefix}.{model}"), numbered) if name not in names
            )
            names.add(service)
            services.append(service)
            is_renamed = service != model
            expanded.append(
                replace(
                    demand,
                    model=service if is_renamed else step,
                    source_model=step if is_renamed else None,
                    file=file,
                    slo=_share_slo(demand.slo, 1.0 / len(models), len(models)),
                )
            )
        if chain in names or chain in chains:
            raise InputError(f"{chain!r} is asked for twice", "name one of them in a column service")
        chains[chain] = Chain(steps=tuple(services), slo_ms=demand.slo.latency_ms, percentile=demand.slo.percentile)
    return expanded, chains


def _share_slo(slo: Slo, part: float, steps: int) -> Slo:
    """Return a step's SLO: a part of the time, and an equal part of the requests that may be late."""
    return Slo(part * slo.latency_ms, 100.0 - (100.0 - slo.percentile) / steps)


def divide_slos(problem: Problem) -> Problem:
    """Return the problem with each chain's SLO divided among its steps so that their replicas cost least.

    Each step costs its least number of replicas times their part of a device, from the capacities that policies plan
    with; of divisions of equal cost, the one that leaves the most time to spare is taken.
    """
    parts: dict[str, float] = {}
    for chain in problem.chains.values():
        parts |= _divide(problem, chain)
    return _with_parts(problem, parts)


def other_divisions(problem: Problem) -> Iterator[Problem]:
    """Yield further divisions, for a plan that lacks capacity: in proportion to the steps' fastest times, and equal."""
    segments = Segments(problem)
    proportional: dict[str, float] = {}
    equal: dict[str, float] = {}
    for chain in problem.chains.values():
        times = {step: _fastest_ms(problem, segments, step) for step in chain.steps}
        total = math.fsum(times.values())
        proportional |= {step: time / total if 0.0 < total < math.inf else 0.0 for step, time in times.items()}
        equal |= dict.fromkeys(chain.steps, 1.0 / len(chain.steps))
    if all(part > 0.0 for part in proportional.values()):
        yield _with_parts(problem, proportional)
    yield _with_parts(problem, equal)


def _with_parts(problem: Problem, parts: Mapping[str, float]) -> Problem:
    whole = {step: chain for chain in problem.chains.values() for step in chain.steps}
    return replace(
        problem,
        demands=tuple(
            demand
            if (chain := whole.get(demand.model)) is None
            else replace(demand, slo=Slo(parts[demand.model] * chain.slo_ms, demand.slo.percentile))
            for demand in problem.demands
        ),
    )


def _divide(problem: Problem, chain: Chain) -> dict[str, float]:
    """Return each step's part of a chain's SLO, by dynamic programming over the number of parts dealt out."""
    #: Parts dealt out to the steps so far → cost, the largest part of a step's budget that its requests need, parts.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    left = len(chain.steps)
    for step in chain.steps:
        left -= 1
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for count in range(1, _PARTS - left + 1):
            cost, use = _find_cost(problem, step, chain.slo_ms * count / _PARTS)
            for dealt, (before, most, parts) in best.items():
                total = dealt + count
                choice = (round(before + cost, 9), max(most, use), (*parts, count))
                if total <= _PARTS - left and (total not in longer or choice < longer[total]):
                    longer[total] = choice
        best = longer
    *_, counts = min(best.values())
    scale = sum(counts)  # parts not dealt out are returned in proportion
    return {step: count / scale for step, count in zip(chain.steps, counts, strict=True)}


def _find_cost(problem: Problem, step: str, budget_ms: float) -> tuple[float, float]:
    """Return the least cost of a step's replicas within a budget, and the part of the budget that they need.

    The cost is infinite where no replica is fast enough.
    """
    before = problem.demand(step)
    demand = replace(before, slo=Slo(budget_ms, before.slo.percentile))
    demands = tuple(demand if item.model == step else item for item in problem.demands)
    segments = Segments(replace(problem, demands=demands))
    costs = [
        (
            entry.price_per_hour * segment.fraction * math.ceil(demand.rate_rps / segment.capacity_rps - 1e-9),
            segments.segment_tail_ms(demand, segment) / budget_ms,
        )
        for entry in problem.fleet.entries
        for segment in segments.best(demand, entry.device)
    ]
    return min(costs, default=(math.inf, 1.0))


def _fastest_ms(problem: Problem, segments: Segments, step: str) -> float:
    """Return the shortest time of a lone request's batch on a device of the fleet; infinite without an estimate."""
    from gpuprof.pipeline.problem import estimate_smallest

    estimates = (estimate_smallest(segments.problem.estimator, step, e.device) for e in problem.fleet.entries)
    return min((e.latency_ms.value for e in estimates if e is not None), default=math.inf)
