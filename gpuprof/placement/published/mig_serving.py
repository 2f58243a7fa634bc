"""MIG-serving's fast algorithm: one GPU configuration after another, each the most useful (Tan et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.mig import Layout, basic_profiles, distinct_layouts
from gpuprof.placement.cover import MOST_REPLICAS, share_out_rate
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: A service is complete when this part of its rate is served.
_COMPLETE = 1.0 - 1e-9

_Chosen = list[tuple[Segment, int]]  # of one GPU: what, at which start


@dataclass(frozen=True, slots=True)
class MigServing:
    """Greedy over GPU configurations: a legal layout with a service in each instance.

    The score of a configuration is Σ (1 − completion) · utility over its services, the utility of an instance being
    the part of a service's rate that it serves (arXiv 2109.11067, the optimizer's heuristic algorithm). Decided here:
    a layout's instances are filled one by one, the largest first, with the service that adds most to the score, so
    that no configuration has to be listed; an instance that no service needs any more stays empty. One process in
    an instance. Interference does not arise.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement on the fleet's first kind of device that has MIG.

        Raises
        ------
        InputError
            When no device of the fleet has MIG.
        """
        entry = problem.mig_entry("mig-serving")
        segments = Segments(problem)
        best = {demand.model: _by_profile(segments, problem, demand.model, entry) for demand in problem.demands}
        gpus = _configure(problem, entry, best)
        placed = tuple(_gpus(problem, entry, gpus))
        return with_unplaced(problem, segments, Placement("mig-serving", placed))


def _by_profile(segments: Segments, problem: Problem, model: str, entry: FleetEntry) -> dict[str, Segment]:
    found = segments.best(problem.demand(model), entry.device)
    return {one.share.mig: one for one in found if one.share.mig is not None and one.share.sm_pct == 100.0}


def _configure(problem: Problem, entry: FleetEntry, best: Mapping[str, Mapping[str, Segment]]) -> list[_Chosen]:
    """Add the configuration of highest score until every service that can be is complete, or the fleet is used up."""
    layouts = distinct_layouts(entry.device, basic_profiles(entry.device))
    completion = {model: 0.0 for model, segments in best.items() if segments}
    replicas = dict.fromkeys(completion, 0)
    gpus: list[_Chosen] = []
    while any(done < _COMPLETE for done in completion.values()):
        if entry.count is not None and len(gpus) >= entry.count:
            break
        filled = (_fill(problem, layout, best, completion, replicas) for layout in layouts)
        score, chosen = max(filled, key=lambda one: one[0])
        if score <= 0.0:
            break
        for segment, _ in chosen:
            completion[segment.model] += segment.capacity_rps / problem.demand(segment.model).rate_rps
            replicas[segment.model] += 1
        gpus.append(chosen)
    return gpus


def _fill(
    problem: Problem,
    layout: Layout,
    best: Mapping[str, Mapping[str, Segment]],
    completion: Mapping[str, float],
    replicas: Mapping[str, int],
) -> tuple[float, _Chosen]:
    """Return the score of a layout filled greedily, and what stands where."""
    done, count, score = dict(completion), dict(replicas), 0.0
    chosen: _Chosen = []
    for item in sorted(layout, key=lambda item: -item.profile.compute_slices):
        options = []
        for model, missing in ((model, 1.0 - part) for model, part in done.items() if part < _COMPLETE):
            segment, demand = best[model].get(item.profile.name), problem.demand(model)
            if segment is not None and count[model] < min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS):
                options.append((missing * segment.capacity_rps / demand.rate_rps, segment))
        if options:
            gain, segment = max(options, key=lambda option: option[0])
            score += gain
            done[segment.model] += segment.capacity_rps / problem.demand(segment.model).rate_rps
            count[segment.model] += 1
            chosen.append((segment, item.start))
    return score, chosen


def _gpus(problem: Problem, entry: FleetEntry, gpus: list[_Chosen]) -> list[PlacedGpu]:
    """Share the rates out over what was chosen."""
    own: dict[str, list[Segment]] = {}
    for chosen in gpus:
        for segment, _ in chosen:
            own.setdefault(segment.model, []).append(segment)
    rates = {
        model: [rate for _, rate in share_out_rate(problem.demand(model).rate_rps, parts).parts]
        for model, parts in own.items()
    }
    placed = []
    for chosen in gpus:
        partitions = [
            PlacedPartition((segment.replica(rates[segment.model].pop(0)),), segment.share.mig, start)
            for segment, start in chosen
        ]
        placed.append(PlacedGpu(entry.device.name, tuple(sorted(partitions, key=lambda one: one.start or 0))))
    return placed
