"""Chains of models: their steps as demands, and the division of a chain's SLO among its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuprof.domain.demand import Demand, Slo, model_name, name_demand, require_possible
from gpuprof.domain.deployment import Chain
from gpuprof.domain.estimate import estimate_smallest
from gpuprof.errors import InputError
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Least number of equal parts of an SLO that are dealt out to the steps: budgets differ by 5% of the SLO.
_PARTS = 20


def expand_chains(demands: Sequence[Demand]) -> tuple[Sequence[Demand], dict[str, Chain]]:
    """Return the demands with the steps of each chain in its place, each with an equal part of the SLO, and the chains.

    A step is named after its model, or ``CHAIN.MODEL`` where another demand has this name. Of a chain, ``percentile``
    percent of the requests are in time if no step delays more than its part of the others, so the steps' percentile is
    higher (union bound). Demands without chains are returned unchanged.

    Raises `InputError` for a chain with a field that holds for a single model, or a name that is not unique.
    """
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
        slo = Slo(demand.slo.latency_ms / len(models), 100.0 - (100.0 - demand.slo.percentile) / len(models))
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
                    slo=slo,
                )
            )
            require_possible(expanded[-1])
        if chain in names or chain in chains:
            raise InputError(f"{chain!r} is asked for twice", "name one of them in a column service")
        chains[chain] = Chain(steps=tuple(services), slo_ms=demand.slo.latency_ms, percentile=demand.slo.percentile)
    return expanded, chains


def divide_slos(problem: Problem) -> Problem:
    """Return the problem with each chain's SLO divided among its steps so that their replicas cost least.

    Each step costs its least number of replicas times their part of a device, from the capacities that policies plan
    with; of divisions of equal cost, the one that leaves the most time to spare is taken.
    """
    parts: dict[str, float] = {}
    for chain in problem.chains.values():
        parts |= _divide(problem, chain)
    return _with_parts(problem, parts)


def divide_by_time(problem: Problem) -> Problem:
    """Return the problem with each chain's SLO divided in proportion to the steps' shortest times on the fleet.

    Used if capacity is short: replicas that take turns need more time than replicas with shares.
    """
    parts: dict[str, float] = {}
    for chain in problem.chains.values():
        times_ms = []
        for step in chain.steps:
            estimates = [estimate_smallest(problem.estimator, step, entry.device) for entry in problem.fleet.entries]
            times_ms.append(min((item.latency_ms.value for item in estimates if item is not None), default=1.0))
        parts |= {step: ms / math.fsum(times_ms) for step, ms in zip(chain.steps, times_ms, strict=True)}
    return _with_parts(problem, parts)


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
    """Return each step's part of a chain's SLO, by dynamic programming over equal units of the SLO."""
    #: Parts dealt out to the steps so far → cost, the largest part of a step's budget that its requests need, parts.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    left = len(chain.steps)
    whole = max(_PARTS, 2 * left)
    for step in chain.steps:
        left -= 1
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for count in range(1, whole - left + 1):
            cost, use = _find_cost(problem, step, chain.slo_ms * count / whole)
            for dealt, (before, most, parts) in best.items():
                total = dealt + count
                choice = (round(before + cost, 9), max(most, use), (*parts, count))
                if total <= whole - left and (total not in longer or choice < longer[total]):
                    longer[total] = choice
        best = longer
    *_, counts = min(best.values())
    scale = sum(counts)  # parts not dealt out are returned in proportion
    return {step: count / scale for step, count in zip(chain.steps, counts, strict=True)}


def _find_cost(problem: Problem, step: str, budget_ms: float) -> tuple[float, float]:
    """Return the least cost of a step's replicas within a part of the SLO, and how much of it they need.

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
