"""The lower bound of a map for many demands of few classes: with interference and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.alone_bound import bound_alone
from gpuprof.placement.optimal.bound_process import BoundProcess
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.demand_classes import group_alike
from gpuprof.placement.optimal.incumbent import clip_bounds, is_proven_optimal, raise_bounds
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import Items
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Part of the time that is left to the bound that counts memory and no neighbours, where there is one with neighbours.
_FOR_MEMORY = 0.15


def bound_classes(
    problem: Problem, segments: Segments, placement: Placement, limit: Limit, process: BoundProcess | None = None
) -> Placement:
    """Return a placement that serves everything with the highest bound that is found in time, or a loose one.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    placement : Placement
    limit : Limit
    process : BoundProcess, optional
        That works on the bound with neighbours already, from another map; what time it leaves is spent on it here.
    """
    bounded = replace(placement, lower_bound_gpus=0, lower_bound_cost_per_hour=0.0)
    task = make_bound_task(problem, segments, placement.gpus)
    if task is not None:
        bounded = raise_bounds(problem, bounded, bound_alone(task.kinds, task.needed, task.demands))
    known = _is_memory_known(problem, segments)
    first = limit.keeping(_FOR_MEMORY * (limit.left_s or 0.0)) if known else limit
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    if process is not None:
        bounded = raise_bounds(problem, bounded, process.wait(first, cost))
    # A process that found no more began with another map: the columns of this one may say more.
    if task is not None and not first.is_over and not is_proven_optimal(problem, bounded):
        for bound in NeighbourBound(task).raise_bound(first):
            bounded = raise_bounds(problem, bounded, bound)
    if known or task is None:
        with problem.limits.until(limit), suppress(TimeUpError):
            offers = CandidateSegments(problem, segments)
            offers.resolve_all_guesses()
            bounded = raise_bounds(problem, bounded, bound_relaxed(problem, problem.demands, offers, limit))
    if not bounded.lower_bound_cost_per_hour:
        bounded = with_cost_bound(problem, segments, placement, limit)
    return clip_bounds(problem, bounded)


def make_bound_task(problem: Problem, segments: Segments, gpus: Sequence[PlacedGpu]) -> BoundTask | None:
    """Return what the bound with neighbours is worked out from; None where nothing is known of how they act in sum.

    Parameters
    ----------
    problem : Problem
    segments : Segments
        Of the same problem.
    gpus : sequence of PlacedGpu
        Of a known map, from which worths begin.
    """
    kinds = tabulate_kinds(problem, segments)
    if not kinds:
        return None
    classes = group_alike(problem, segments).values()
    return BoundTask(
        kinds=kinds,
        needed=np.array([sum(one.rate_rps for one in own) for own in classes]),
        demands=np.array([float(len(own)) for own in classes]),
        known=tuple(dict.fromkeys(_read_known(problem, segments, gpus))),
        seed=problem.options.seed,
    )


def _read_known(problem: Problem, segments: Segments, gpus: Sequence[PlacedGpu]) -> Iterator[tuple[int, Items]]:
    """Yield what stands on the devices of a known map, by the numbers of kinds and workloads."""
    kinds = tabulate_kinds(problem, segments)
    indices = [{one: index for index, one in enumerate(kind.workloads)} for kind in kinds]
    numbers = {entry.device.name: number for number, entry in enumerate(problem.fleet.entries)}
    for gpu in gpus:
        number = numbers[gpu.device]
        standing = [replace(one.workload, model=segments.first_alike(one.model)) for one in gpu.replicas()]
        if all(one in indices[number] for one in standing):
            yield number, tuple(sorted(indices[number][one] for one in standing))


def _is_memory_known(problem: Problem, segments: Segments) -> bool:
    """Whether the memory of any demand is known: where none is, shares and neighbours say all."""
    for kind, entry in zip(tabulate_kinds(problem, segments), problem.fleet.entries, strict=False):
        _, firsts = np.unique(kind.classes, return_index=True)
        for first in firsts.tolist():
            estimate = segments.estimate(entry.device, kind.workloads[first])
            if segments.memory_bytes(estimate):
                return True
    return False
