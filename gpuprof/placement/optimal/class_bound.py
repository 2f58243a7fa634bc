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
from gpuprof.placement.optimal.capacity_map import place_by_capacities
from gpuprof.placement.optimal.capacity_program import choose_columns
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.demand_classes import group_alike, is_of_few_classes
from gpuprof.placement.optimal.incumbent import (
    clip_bounds,
    is_proven_optimal,
    raise_bounds,
    sum_prices,
    update_incumbent,
)
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import Items
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: Part of the time that is left to the bound that counts memory and no neighbours, where there is one with neighbours.
_FOR_MEMORY = 0.15
#: Part of the time that is left to a map of the devices on which the bound rests, where no process worked on it.
_FOR_MAP = 0.5


def bound_classes(
    problem: Problem, segments: Segments, placement: Placement, limit: Limit, process: BoundProcess | None = None
) -> Placement:
    """Return a placement that serves everything with the highest bound that is found in time, or a loose one.

    Without a process the devices on which the bound rests make a map, too, which is returned where it is better.

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
    cost = sum_prices(problem, placement.gpus)
    if process is not None:
        bounded = raise_bounds(problem, bounded, process.wait(first, cost))
    # A process that found no more began with another map: the columns of this one may say more.
    if task is not None and not first.is_over and not is_proven_optimal(problem, bounded):
        own = NeighbourBound(task)
        until = first if process is not None else first.keeping(_FOR_MAP * (first.left_s or 0.0))
        for bound in own.raise_bound(until):
            bounded = raise_bounds(problem, bounded, bound)
        if process is None and not is_proven_optimal(problem, bounded):
            bounded = _improve_by_capacities(problem, segments, bounded, own, first)
    if known or task is None:
        with problem.limits.until(limit), suppress(TimeUpError):
            offers = CandidateSegments(problem, segments)
            offers.resolve_all_guesses()
            bounded = raise_bounds(problem, bounded, bound_relaxed(problem, problem.demands, offers, limit))
    if not bounded.lower_bound_cost_per_hour:
        improved = replace(placement, gpus=bounded.gpus, found_by=bounded.found_by)
        bounded = with_cost_bound(problem, segments, improved, limit)
    return clip_bounds(problem, bounded)


def improve_by_classes(problem: Problem, segments: Segments, placement: Placement) -> Placement:
    """Return a placement of few classes with a latency budget, or a better one, with the higher of its bounds."""
    wanted = problem.options.latency_budget is not None and is_of_few_classes(problem, segments)
    if not wanted or placement.unplaced or is_proven_optimal(problem, placement):
        return placement
    bounded, known = bound_classes(problem, segments, placement, Limit()), placement.lower_bound_cost_per_hour
    return bounded if known is None else raise_bounds(problem, bounded, known)


def _improve_by_capacities(
    problem: Problem, segments: Segments, placement: Placement, bound: NeighbourBound, limit: Limit
) -> Placement:
    columns = choose_columns(bound.task.kinds, bound.task.demands, bound.rank_patterns(), limit)
    gpus = None if columns is None else place_by_capacities(problem, segments, columns, limit)
    if gpus is None:
        return placement
    made = with_unplaced(problem, segments, Placement(placement.policy, gpus))
    return update_incumbent(problem, placement, made, "patterns of classes")


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
        for_maps=True,
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
