"""The lower bound of a map for many demands of few classes: with what neighbours cost, and with memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.incumbent import clip_bounds, raise_bounds
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.neighbour_bound import bound_with_neighbours
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Part of the time that is left to the bound that counts memory and no neighbours, where there is one with neighbours.
_FOR_MEMORY = 0.15
#: Seconds of processor time that the bound with neighbours may take in any case: in fewer it says next to nothing.
_LEAST_S = 0.6


def bound_classes(problem: Problem, segments: Segments, placement: Placement, limit: Limit) -> Placement:
    """Return a placement that serves everything with the highest bound that is found in time, or a loose one.

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
    first = limit.keeping(_FOR_MEMORY * (limit.left_s or 0.0)).with_least(_LEAST_S)
    with_neighbours = bound_with_neighbours(problem, segments, placement.gpus, first)
    bounded = raise_bounds(problem, bounded, with_neighbours)
    with problem.limits.until(limit), suppress(TimeUpError):
        offers = CandidateSegments(problem, segments)
        offers.work_out_all()
        relaxed = bound_relaxed(problem, problem.demands, offers, limit)
        return clip_bounds(problem, raise_bounds(problem, bounded, relaxed))
    return clip_bounds(problem, bounded if with_neighbours else with_cost_bound(problem, segments, placement, limit))
