"""Maps for many demands of few classes, the best kind that there is time for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.bound_process import BoundProcess
from gpuprof.placement.optimal.capacity_map import place_by_capacities
from gpuprof.placement.optimal.class_search import ClassSearch
from gpuprof.placement.optimal.incumbent import sum_prices
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Part of a time limit that the search by patterns leaves to the bound where this has no process of its own.
_FOR_BOUND = 0.35
#: Part of the limit, and seconds at most, of processor time that the first program of the bound's devices has in any
#: case; for another there must be so many seconds.
_LEAST_PROGRAM_PART, _LEAST_PROGRAM_S = 0.25, 1.2


def search_class_maps(
    problem: Problem, segments: Segments, known: Sequence[PlacedGpu], limit: Limit, process: BoundProcess | None
) -> Iterator[tuple[PlacedGpu, ...]]:
    """Yield maps that serve all demands, of patterns of classes and of the devices on which the bound rests.

    The latter are better: as soon as the process of the bound has said which they are, the search for others ends. It
    says so several times, the longer it has worked the better.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    known : sequence of PlacedGpu
        A map that serves all demands.
    limit : Limit
    process : BoundProcess, optional
        That works on the bound.
    """
    if process is None:
        yield from _search_patterns(problem, segments, known, limit.keeping(_FOR_BOUND * (limit.left_s or 0.0)))
        return
    found = list(_search_patterns(problem, segments, known, limit.unless(process.has_columns)))
    yield from found
    least = limit.with_least(min(_LEAST_PROGRAM_S, _LEAST_PROGRAM_PART * (limit.seconds or 0.0)))
    cost = min((sum_prices(problem, gpus) for gpus in found), default=math.inf)
    columns = process.take_columns(limit.keeping(_LEAST_PROGRAM_S), cost)
    while columns is not None:
        gpus = place_by_capacities(problem, segments, columns, least)
        if gpus is not None:
            cost = min(cost, sum_prices(problem, gpus))
            yield gpus
        least = limit
        columns = process.take_columns(limit.keeping(_LEAST_PROGRAM_S), cost)
    if math.isinf(cost) and not limit.is_over:
        yield from _search_patterns(problem, segments, known, limit)


def _search_patterns(
    problem: Problem, segments: Segments, known: Sequence[PlacedGpu], limit: Limit
) -> Iterator[tuple[PlacedGpu, ...]]:
    gpus = ClassSearch(problem, segments, limit).search([known])
    if gpus is not None:
        yield gpus
