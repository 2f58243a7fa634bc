"""The lower bound of a map for many demands of few classes: shares by tables, and memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.alone_bound import bound_alone
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.demand_classes import group_alike
from gpuprof.placement.optimal.incumbent import clip_bounds, raise_bounds
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments


def bound_classes(problem: Problem, segments: Segments, placement: Placement, limit: Limit) -> Placement:
    """Return a placement serving everything with the highest bound found in time.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    placement : Placement
    limit : Limit
    """
    bounded = replace(placement, lower_bound_gpus=0, lower_bound_cost_per_hour=0.0)
    kinds = tabulate_kinds(problem, segments)
    if kinds:
        classes = group_alike(problem, segments).values()
        needed = np.array([sum(demand.rate_rps for demand in of_class) for of_class in classes])
        demands = np.array([float(len(of_class)) for of_class in classes])
        bounded = raise_bounds(problem, bounded, bound_alone(kinds, needed, demands))
    if not kinds or _is_memory_known(problem, segments):
        with problem.limits.until(limit), suppress(TimeUpError):
            offers = CandidateSegments(problem, segments)
            offers.resolve_all_guesses()
            bounded = raise_bounds(problem, bounded, bound_relaxed(problem, problem.demands, offers, limit))
    if not bounded.lower_bound_cost_per_hour:
        bounded = with_cost_bound(problem, segments, placement, limit)
    return clip_bounds(problem, bounded)


def _is_memory_known(problem: Problem, segments: Segments) -> bool:
    """Return whether the memory of any demand is known: otherwise shares alone give the bound."""
    for kind, entry in zip(tabulate_kinds(problem, segments), problem.fleet.entries, strict=True):
        _, firsts = np.unique(kind.classes, return_index=True)
        for first in firsts.tolist():
            if segments.memory_bytes(segments.estimate(entry.device, kind.workloads[first])):
                return True
    return False
