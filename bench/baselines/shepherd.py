"""Shepherd's idea as a static plan: every device serves one model (Zhang et al., NSDI'23)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS, Bin, share_out_rate
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced


@dataclass(frozen=True, slots=True)
class Shepherd:
    """Whole devices, each for one model with the batch that serves most within the SLO, as USHER §5.2 compares with it.

    Shepherd's planner groups streams and gives each group devices of its own so that most is served in time; its online
    part serves one model at a time on a device. Decided here, where a map stands for longer: a group is one model; each
    further device goes to the model of the highest priority that is not served, then to the one that gains most
    goodput for its price, which for groups of one is the planner's optimum, as every further device of a model gains
    no more than the one before. Preemption has no place in a map.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement."""
        segments = Segments(problem, capped=False)
        segments_by_model = {demand.model: _find_whole(problem, segments, demand) for demand in problem.demands}
        missing_rps = {demand.model: demand.rate_rps for demand in problem.demands}
        chosen: dict[str, list[Segment]] = {demand.model: [] for demand in problem.demands}
        free = {entry.device.name: entry.count for entry in problem.fleet.entries}
        while (best := _find_best(problem, segments_by_model, missing_rps, chosen, free)) is not None:
            chosen[best.model].append(best)
            missing_rps[best.model] = max(0.0, missing_rps[best.model] - best.capacity_rps)
            count = free[best.device]
            free[best.device] = None if count is None else count - 1
        gpus = []
        for demand in problem.by_priority():
            replicas = chosen[demand.model]
            for segment, rate in share_out_rate(demand.rate_rps, replicas).parts if replicas else ():
                gpu_bin = Bin(problem.device(segment.device))
                gpu_bin.add(segment.replica(rate), segments)
                gpus.append(gpu_bin.to_gpu())
        return with_unplaced(problem, segments, Placement("shepherd", tuple(gpus)))


def _find_whole(problem: Problem, segments: Segments, demand: Demand) -> list[Segment]:
    """Return for each kind of device the segment on all of it, or on the largest part that anything is known of."""
    choices = []
    for entry in problem.fleet.entries:
        with suppress(InputError):
            share = max(problem.estimator.shares(demand.model, entry.device), key=entry.device.fraction, default=None)
            segment = None if share is None else segments.best_of(demand, entry.device, share)
            if segment is not None:
                choices.append(segment)
    return choices


def _find_best(
    problem: Problem,
    segments_by_model: Mapping[str, list[Segment]],
    missing_rps: Mapping[str, float],
    chosen: Mapping[str, list[Segment]],
    free: Mapping[str, int | None],
) -> Segment | None:
    """Return what the next device serves; None when all is served or nothing more can be."""
    best: tuple[int, float, Segment] | None = None
    for demand in problem.by_priority():
        if missing_rps[demand.model] <= demand.rate_rps * 1e-9:
            continue
        if len(chosen[demand.model]) >= min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS):
            continue
        for segment in segments_by_model[demand.model]:
            if free[segment.device] == 0:
                continue
            gain = min(missing_rps[demand.model], segment.capacity_rps) / problem.entry(segment.device).price_per_hour
            if best is None or (demand.priority, gain) > best[:2]:
                best = (demand.priority, gain, segment)
    return None if best is None else best[2]
