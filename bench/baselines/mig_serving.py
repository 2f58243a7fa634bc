"""MIG-serving: one GPU configuration after another, each the most useful (Tan et al., 2021), its fast algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.baselines.mig_configuration import COMPLETE, MigConfiguration, Services, rank_configurations
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.mig import Layout, basic_profiles, distinct_layouts
from gpuprof.placement.bin import share_out_rate
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced


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

        Raises `InputError` when no device of the fleet has MIG.
        """
        entry = problem.mig_entry("mig-serving")
        segments = Segments(problem)
        services = Services(problem, {d.model: _by_profile(segments, problem, d.model, entry) for d in problem.demands})
        layouts = distinct_layouts(entry.device, basic_profiles(entry.device))
        gpus = _configure(services, layouts, entry.count)
        placed = Placement("mig-serving", tuple(_gpus(problem, entry, gpus)))
        return with_unplaced(problem, segments, placed)


def _by_profile(segments: Segments, problem: Problem, model: str, entry: FleetEntry) -> dict[str, Segment]:
    best = segments.best(problem.demand(model), entry.device)
    return {
        segment.share.mig: segment
        for segment in best
        if segment.share.mig is not None and segment.share.sm_pct == 100.0
    }


def _configure(services: Services, layouts: Sequence[Layout], most: int | None) -> tuple[MigConfiguration, ...]:
    """Add the configuration of highest score until every service that can be is complete, or the fleet is used up."""
    completion = dict.fromkeys(services.rates, 0.0)
    replicas: Counter[str] = Counter(dict.fromkeys(services.rates, 0))
    gpus: list[MigConfiguration] = []
    while any(fraction < COMPLETE for fraction in completion.values()) and (most is None or len(gpus) < most):
        ranked = rank_configurations(services, layouts, completion, replicas)
        if not ranked:
            break
        for instance in ranked[0]:
            model = instance.segment.model
            completion[model] += instance.segment.capacity_rps / services.rates[model]
            replicas[model] += 1
        gpus.append(ranked[0])
    return tuple(gpus)


def _gpus(problem: Problem, entry: FleetEntry, gpus: Sequence[MigConfiguration]) -> list[PlacedGpu]:
    """Share the rates out over what was chosen."""
    by_model: dict[str, list[Segment]] = {}
    for chosen in gpus:
        for instance in chosen:
            by_model.setdefault(instance.segment.model, []).append(instance.segment)
    rates = {
        model: [rate for _, rate in share_out_rate(problem.demand(model).rate_rps, parts).parts]
        for model, parts in by_model.items()
    }
    placed = []
    for chosen in gpus:
        partitions = [
            PlacedPartition(
                (filled.segment.replica(rates[filled.segment.model].pop(0)),), filled.segment.share.mig, filled.start
            )
            for filled in chosen
        ]
        placed.append(
            PlacedGpu(entry.device.name, tuple(sorted(partitions, key=lambda partition: partition.start or 0)))
        )
    return placed
