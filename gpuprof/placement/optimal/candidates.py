"""The capacity table: the segments that the maps of a problem are made of.

An estimator lists shares worth considering, and may give estimates for others too: parts of a MIG instance, and
percentages between the listed ones. With a latency budget every share is evaluated. Under the queueing model, where
each evaluation solves queues, the listed shares are evaluated up to the smallest that serves the whole demand; of the
unlisted shares, only those that a bisection tries for the smallest share that serves the demand or its remainder.

The segment of largest capacity is offered for each share. Where the best segments together may exceed the memory,
segments with less memory and less capacity are offered too: memory and batch are then decided by the program.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.optimal.pattern import SPACE, PartitionKind, is_binding, share_units
from gpuprof.placement.problem import Problem
from gpuprof.placement.search_space import SHARE_STEP
from gpuprof.placement.segment import Segment, Segments, SharedSegments

Choices = Mapping[str, tuple[Segment, ...]]


@dataclass(slots=True)
class CandidateSegments:
    """The segments of every demand on every device of the fleet; alike demands are evaluated once."""

    problem: Problem
    segments: Segments
    #: True for the choices of a bound: claimed shares (`Segments.is_claimed`) are offered, and parts of a partition
    #: that nothing runs beside.
    is_bounding: bool = False
    _lone: Segments = field(init=False)

    def __post_init__(self) -> None:
        self._lone = Segments(self.problem)

    def list_choices(self) -> Choices:
        """Return the segments, by model."""
        demands = [d for d in self.problem.demands if self.segments.first_alike(d.model) == d.model]
        segments = {demand.model: list(self._list_segments(demand)) for demand in demands}
        self._offer_leaner(segments)
        choices = {model: drop_dominated(options) for model, options in segments.items()}
        return name_alike(self.problem, self.segments, choices)

    def list_undivided(self) -> Choices:
        """Return the segments of whole devices and whole instances, which have no neighbours, by model."""
        choices = {}
        for demand in self.problem.demands:
            if self.segments.first_alike(demand.model) == demand.model:
                options = (
                    self.segments.best_of(demand, entry.device, Share(mig=mig))
                    for entry in self.problem.fleet.entries
                    for mig in dict.fromkeys(s.mig for s in self.problem.estimator.shares(demand.model, entry.device))
                )
                choices[demand.model] = tuple(segment for segment in options if segment is not None)
        return name_alike(self.problem, self.segments, choices)

    def _list_segments(self, demand: Demand) -> Iterator[Segment]:
        for entry in self.problem.fleet.entries:
            for mig, (listed, steps) in list_percents(self.segments, demand.model, entry.device).items():
                yield from self._list_in_partition(demand, entry.device, mig, listed, steps)

    def _list_in_partition(
        self, demand: Demand, device: Device, mig: str | None, listed: Sequence[float], steps: Sequence[float]
    ) -> Iterator[Segment]:
        by_pct: dict[float, Segment | None] = {}

        def capacity_rps(percent: float) -> float:
            if percent not in by_pct:
                by_pct[percent] = self._find_best(demand, device, Share(percent, mig))
            segment = by_pct[percent]
            return 0.0 if segment is None else segment.capacity_rps

        by_budget = self.problem.options.latency_budget is not None
        for percent in steps if by_budget else listed:
            if capacity_rps(percent) >= demand.rate_rps and not by_budget:
                break
        if by_pct and not by_budget and (mig is None or max(map(capacity_rps, by_pct)) >= demand.rate_rps):
            best = max(by_pct, key=lambda percent: capacity_rps(percent) / percent)
            if replica_rps := capacity_rps(best):
                rest_rps = demand.rate_rps - replica_rps * math.floor(demand.rate_rps / replica_rps * (1.0 - 1e-9))
                bisect_left(steps, True, key=lambda percent: capacity_rps(percent) >= rest_rps)
        yield from (segment for percent in sorted(by_pct) if (segment := by_pct[percent]) is not None)
        if self.is_bounding and isinstance(self.segments, SharedSegments):
            whole = Share(mig=mig)
            lone = (self._lone.best_of(demand, device, Share(percent, mig)) for percent in listed if percent < 100.0)
            yield from (replace(segment, share=whole, fraction=device.fraction(whole)) for segment in lone if segment)

    def _find_best(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        best = self.segments.best_of(demand, device, share)
        if best is None or not self.segments.is_claimed(device, best.workload):
            return best
        return self._limit_claim(device, best) if self.is_bounding else None

    def _limit_claim(self, device: Device, segment: Segment) -> Segment:
        """Return a segment of a claimed share (USHER's premise) at the rate for which the device's time suffices.

        A replica needs its part of the device's time for each batch (`gpuprof.placement.feasibility`). One that needs
        more than the share is counted under the next share.
        """
        utilization = self.segments.estimate(device, segment.workload).creq("wavg_sm_util")
        needed_pct = 100.0 if utilization is None or not utilization.is_observed else min(100.0, utilization.value)
        part = min(1.0, (segment.share.sm_pct + SHARE_STEP) / needed_pct)
        return replace(segment, capacity_rps=segment.capacity_rps * part)

    def _offer_leaner(self, choices: Mapping[str, list[Segment]]) -> None:
        """Add segments with less memory in partitions where memory may be short."""
        binding = find_binding(self.problem, choices)
        for model, segments in choices.items():
            for best in tuple(segments):
                if (best.device, best.share.mig) in binding:
                    device = self.problem.device(best.device)
                    segments += self.segments.leaner(self.problem.demand(model), device, best)


def list_percents(
    segments: Segments, model: str, device: Device
) -> dict[str | None, tuple[Sequence[float], Sequence[float]]]:
    """Return the listed percentages of each partition, and all percentages that a replica may have, rising."""
    percents: defaultdict[str | None, set[float]] = defaultdict(set)
    for share in segments.problem.estimator.shares(model, device):
        percents[share.mig].add(share.sm_pct)
    return {
        mig: (sorted(listed), sorted(listed | set(segments.search_space.steps(model, device, mig))))
        for mig, listed in percents.items()
    }


def find_binding(problem: Problem, choices: Mapping[str, Sequence[Segment]]) -> frozenset[PartitionKind]:
    """Return the partitions whose memory may be short for segments whose shares fit together."""
    memory_by_kind: defaultdict[PartitionKind, dict[Share, int]] = defaultdict(dict)
    for segments in choices.values():
        for segment in segments:
            memory_by_share = memory_by_kind[segment.device, segment.share.mig]
            memory_by_share[segment.share] = max(memory_by_share.get(segment.share, 0), segment.memory_bytes or 0)
    return frozenset(
        kind
        for kind, memory_by_share in memory_by_kind.items()
        if is_binding(
            [share_units(share) for share in memory_by_share],
            list(memory_by_share.values()),
            SPACE,
            problem.device(kind[0]).memory_bytes(Share(100.0, kind[1])),
        )
    )


def with_least_memory(problem: Problem, segments: Segments, choices: Choices) -> Choices:
    """Return the choices; where memory may be short, with the least memory of any batch under each share.

    Batches between the listed ones may take less memory than those of the choices.
    """
    binding = find_binding(problem, choices)

    def lighten(segment: Segment) -> Segment:
        device = problem.device(segment.device)
        if (segment.device, segment.share.mig) not in binding:
            return segment
        if not segments.search_space.is_dense(segment.model, device, segment.share):
            return segment
        smallest = segments.search_space.sizes(segment.model, device, segment.share)[0]
        with suppress(InputError):
            least = segments.memory_bytes(segments.estimate(device, replace(segment.workload, batch=smallest)))
            return replace(segment, memory_bytes=min(least or 0, segment.memory_bytes or 0))
        return segment

    return {model: tuple(map(lighten, group)) for model, group in choices.items()}


def name_alike(problem: Problem, segments: Segments, choices: Choices) -> Choices:
    """Return the segments of each class's first demand for all demands of the class, under their own names."""
    result = {}
    for demand in problem.demands:
        first = segments.first_alike(demand.model)
        if first == demand.model:
            result[demand.model] = choices[first]
        else:
            result[demand.model] = tuple(replace(segment, model=demand.model) for segment in choices[first])
    return result


def drop_dominated(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Drop segments that another segment of no larger share dominates in capacity and memory; keep the order."""
    best: list[Segment] = []
    order = sorted(segments, key=lambda item: (item.share.sm_pct, item.memory_bytes or 0, -item.capacity_rps))
    for segment in order:
        peers = (peer for peer in best if (peer.device, peer.share.mig) == (segment.device, segment.share.mig))
        if not any(
            peer.capacity_rps >= segment.capacity_rps and (peer.memory_bytes or 0) <= (segment.memory_bytes or 0)
            for peer in peers
        ):
            best.append(segment)
    ids = {id(item) for item in best}
    return tuple(item for item in segments if id(item) in ids)
