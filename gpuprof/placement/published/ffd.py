"""First-fit decreasing over shares and batch sizes: quick, always applicable, the yardstick for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import Unplaced
from gpuprof.placement.bin import MOST_REPLICAS, Cost, FleetBins, cheapest_cover, make_cost
from gpuprof.placement.placement import PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import explain_shortfall, explain_unplaced


@dataclass(frozen=True, slots=True)
class FirstFitDecreasing:
    """First fit decreasing: chooses the cheapest segments for each demand and packs the largest first.

    Only shares, batch sizes and numbers of processes with an estimate are used. A replica goes to the first device with
    enough room where all co-located replicas keep their SLOs. On a fixed fleet, the remainder is tried again in smaller
    segments, demands of high priority first, so that as much as possible is served.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`."""
        segments = Segments(problem)
        cost = make_cost(problem)
        choices = {demand.model: _choices(problem, segments, demand) for demand in problem.demands}
        bins = FleetBins(problem, segments)
        missing = _pack(problem, choices, cost, bins)
        unplaced = []
        for demand in problem.by_priority():
            missing_rps = missing[demand.model]
            if missing_rps > demand.rate_rps * 1e-9:
                missing_rps = _squeeze(demand, missing_rps, choices[demand.model], bins)
            if missing_rps > demand.rate_rps * 1e-9:
                unplaced.append(_name_unplaced(problem, segments, demand, missing_rps))
        return Placement("ffd", bins.to_gpus(), tuple(unplaced))


def _choices(problem: Problem, segments: Segments, demand: Demand) -> tuple[Segment, ...]:
    return tuple(segment for entry in problem.fleet.entries for segment in segments.best(demand, entry.device))


def _pack(problem: Problem, choices: dict[str, tuple[Segment, ...]], cost: Cost, bins: FleetBins) -> dict[str, float]:
    """Place the cheapest covers, largest replica first; return the unplaced rate of each model."""
    missing = {}
    items: list[tuple[int, float, int, str, PlacedReplica]] = []
    for position, demand in enumerate(problem.demands):
        cover = cheapest_cover(demand, choices[demand.model], cost)
        missing[demand.model] = cover.missing_rps
        for (segment, _), (device, replica) in zip(cover.parts, cover.replicas(), strict=True):
            items.append((-demand.priority, -segment.fraction, position, device, replica))
    for _, _, _, device, replica in sorted(items, key=lambda item: item[:3]):
        if not bins.first_fit(device, replica):
            missing[replica.model] += replica.rate_rps
    return missing


def _squeeze(demand: Demand, missing_rps: float, segments: Sequence[Segment], bins: FleetBins) -> float:
    """Fill the remaining room with the segments that serve most; return the rate that is still unplaced."""
    placed = bins.count(demand.model)
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    for segment in sorted(segments, key=lambda s: (-min(s.capacity_rps, missing_rps), s.fraction)):
        while missing_rps > demand.rate_rps * 1e-9 and placed < most:
            rate = min(missing_rps, segment.capacity_rps)
            if not bins.first_fit(segment.device, segment.replica(rate)):
                break
            missing_rps -= rate
            placed += 1
    return max(0.0, missing_rps)


def _name_unplaced(problem: Problem, segments: Segments, demand: Demand, missing_rps: float) -> Unplaced:
    if missing_rps < demand.rate_rps * (1.0 - 1e-9):
        return Unplaced(
            model=demand.model,
            rate_rps=missing_rps,
            reason=explain_shortfall(problem, demand, demand.rate_rps - missing_rps),
        )
    return Unplaced(model=demand.model, rate_rps=demand.rate_rps, reason=explain_unplaced(problem, segments, demand))
