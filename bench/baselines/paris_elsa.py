"""PARIS and ELSA: MIG instances of the size whose knee suits each model, served by slack (Kim et al., DAC'22)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS, FleetBins, share_out_rate
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

#: An instance is used well from the batch on at which it reaches this part of its most throughput (the paper's knee).
KNEE = 0.8


@dataclass(frozen=True, slots=True)
class ParisElsa:
    """Heterogeneous MIG instances (PARIS), requests to the smallest that keeps its SLO (ELSA, the router's own rule).

    PARIS gives each batch size the smallest instance that it uses well: the batch at its knee. Its servers are sent
    batches; here they make them. So a model gets the size of instance that serves most for its compute slices at the
    first batch at or beyond the knee that keeps the SLO, the smaller of equal ones, and as many of them as its rate
    needs. Decided here: one process in an instance; the largest instances are packed first, each where it stands in the
    way of least; the last replica gets the smallest instance that serves the rest.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement on the fleet's first kind of device that has MIG.

        Raises `InputError` when no device of the fleet has MIG.
        """
        entry = problem.mig_entry("paris-elsa")
        segments = Segments(problem, capped=False)
        bins = FleetBins(problem, segments)
        replicas = []
        for demand in problem.by_priority():
            parts = _choose_instances(demand, find_knees(segments, demand, entry))
            cover = share_out_rate(demand.rate_rps, parts).parts if parts else ()
            replicas += [(-demand.priority, -segment.fraction, segment.replica(rate)) for segment, rate in cover]
        for _, _, replica in sorted(replicas, key=lambda item: item[:2]):
            bins.first_fit(entry.device.name, replica)
        return with_unplaced(problem, segments, Placement("paris-elsa", bins.to_gpus()))


def find_knees(segments: Segments, demand: Demand, entry: FleetEntry) -> list[Segment]:
    """Return for each size of instance the segment of the first batch at or beyond its knee that keeps the SLO.

    Where only smaller batches keep it, the largest of those.
    """
    knees = []
    for profile in entry.device.mig_profiles:
        share = Share(100.0, profile.name)
        able: list[Segment] = []
        most = 0.0
        with suppress(InputError):
            for batch in segments.search_space.listed_batches(demand.model, entry.device, share):
                workload = Workload(demand.model, batch, share)
                segment = segments.make(demand, entry.device, workload)
                with suppress(InputError):
                    most = max(most, segments.throughput_rps(entry.device, workload))
                able += [] if segment is None else [segment]
        if able:
            beyond = [candidate for candidate in able if 1000.0 * candidate.batch / candidate.latency_ms >= KNEE * most]
            knees.append(beyond[0] if beyond else able[-1])
    return knees


def _choose_instances(demand: Demand, knees: list[Segment]) -> list[Segment]:
    if not knees:
        return []
    best = max(knees, key=lambda segment: (round(segment.capacity_rps / segment.fraction, 6), -segment.fraction))
    limit = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    full = min(limit, int(demand.rate_rps / best.capacity_rps * (1.0 + 1e-12)))
    rest = demand.rate_rps - full * best.capacity_rps
    parts = [best] * full
    if rest > demand.rate_rps * 1e-9 and full < limit:
        enough = [segment for segment in knees if segment.capacity_rps >= rest]
        parts.append(min(enough, key=lambda segment: segment.fraction, default=best))
    return parts
