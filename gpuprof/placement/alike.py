"""Finds equivalent demands: equal requirements of models with equal estimates.

Tenants often demand the same service of a model under many names. Results for the first of them hold for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, NamingEstimator, Workload
from gpuprof.domain.sojourn import queue_of
from gpuprof.errors import InputError
from gpuprof.placement.problem import Problem


def find_alike(problem: Problem) -> Mapping[str, str]:
    """Return the first equivalent demand's model, for each demand's model.

    Models are compared by the estimates of a few workloads of each, alone and beside neighbours: models are equivalent
    when times and memory agree to the last digit. Failures beside neighbours are recorded by model name.
    """
    key = (problem.demands, id(problem.estimator), id(problem.queueing))
    if key not in problem.alike:
        # Both objects are kept with the result: otherwise another object could reuse a deleted object's id.
        problem.alike[key] = (problem.estimator, problem.queueing), dict(_pair_with_first(problem))
    return problem.alike[key][1]


def _pair_with_first(problem: Problem) -> Iterator[tuple[str, str]]:
    estimator = problem.estimator
    groups: defaultdict[tuple[Demand, int], list[str]] = defaultdict(list)
    for demand in problem.demands:
        arrive = id(queue_of(problem.queueing, demand.model))  # of the same arrival law, at the same rate
        groups[replace(demand, model="", source_model=None, file=None), arrive].append(demand.model)
    groups_failed = (run for run in problem.tried.failed if run.beside)
    failed = {workload.model for run in groups_failed for workload in (run.workload, *run.beside)}
    for names in groups.values():
        first_names: dict[object, str] = {}
        probes: dict[str, tuple[Estimate, ...]] = {}
        for name in names:
            model = estimator.source_of(name) if isinstance(estimator, NamingEstimator) else name
            if model not in probes:
                probes[model] = tuple(_probe(problem, name)) if len(names) > 1 else ()
            figures = probes[model]
            source = (problem.demand(name).source_model or name) if name in failed else None
            yield name, first_names.setdefault((figures, source), name) if any(figures) else name


def _probe(problem: Problem, model: str) -> Iterator[Estimate]:
    """Yield the estimates of the smallest, a middle and the largest workload, on each kind of device."""
    for entry in problem.fleet.entries:
        with suppress(InputError):
            shares = problem.estimator.shares(model, entry.device)
            for place in (0, len(shares) // 2, -1) if shares else ():
                sizes = problem.estimator.batches(model, entry.device, shares[place])
                workload = Workload(model, sizes[place if place < 1 else len(sizes) // 2], shares[place])
                yield _ask(problem, entry.device, workload, ())
                if place > 0:
                    yield _ask(problem, entry.device, workload, (workload,))


def _ask(problem: Problem, device: Device, workload: Workload, neighbours: tuple[Workload, ...]) -> Estimate:
    estimate = problem.estimator.estimate(workload.model, device, workload.batch, workload.share, neighbours)
    return replace(estimate, workload=replace(workload, model=""))
