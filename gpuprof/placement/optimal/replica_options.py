"""Shares of a demand's replicas on a kind of device, and the most they serve beside any neighbours, for bounds.

A replica that has a part of a partition shares it with others, which slow it down at least as much as the estimator
says of any neighbours, or leaves the rest of it idle and so takes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import SlowingEstimator, Workload, batch_times
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.pooled_segment import LESS, BoundingSegments
from gpuprof.placement.rate_bound import most_within_rps

_WHOLE = 100.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Where a replica may run, at any batch of the search space."""

    share: Share
    processes: int
    is_alone: bool  #: In its partition.


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """A replica of one demand on one kind of device."""

    part: float  #: Of a device, which it takes.
    rate_rps: float  #: What it serves at most, no more than the demand asks for.
    #: Which of them may serve the whole demand alone, as long as no queue was solved.
    candidates: tuple[_Candidate, ...] = ()


def list_options(segments: BoundingSegments, demand: Demand, entry: FleetEntry) -> tuple[ReplicaOption, ...]:
    """Return what replicas of a demand may be on a kind of device, by rising part, without what serves no more."""
    device, found = entry.device, list[ReplicaOption]()
    for share in _list_shares(segments, demand, entry):
        parts = [(device.fraction(Share(mig=share.mig)), True)]
        if share.sm_pct < _WHOLE:
            parts.append((device.fraction(share), False))
        for processes in segments.search_space.processes(share):
            for part, is_alone in parts:
                candidate = _Candidate(share, processes, is_alone)
                most = max(_bound_rates(segments, demand, entry, candidate), default=0.0)
                if most < demand.rate_rps:
                    found.append(ReplicaOption(part, most))
                else:
                    found.append(ReplicaOption(part, demand.rate_rps, (candidate,)))
    return _keep_undominated(found)


def settle_options(
    segments: BoundingSegments, demand: Demand, entry: FleetEntry, options: Sequence[ReplicaOption]
) -> tuple[ReplicaOption, ...]:
    """Return the options up to the first of which a queue shows that it serves the whole demand alone."""
    settled: list[ReplicaOption] = []
    for option in options:
        one = _solve_queues(segments, demand, entry, option) if option.candidates else option
        if one.rate_rps > (settled[-1].rate_rps if settled else 0.0):
            settled.append(one)
        if one.rate_rps >= demand.rate_rps:
            break
    return tuple(settled)


def _solve_queues(
    segments: BoundingSegments, demand: Demand, entry: FleetEntry, option: ReplicaOption
) -> ReplicaOption:
    """Return the option with what it serves: a little less than the demand where all its candidates are too late."""
    for candidate in reversed(option.candidates):  # of the same part a larger share is likelier to suffice
        for batch in segments.search_space.listed_batches(demand.model, entry.device, candidate.share):
            with suppress(InputError):
                if segments.serves_alone(demand, _make_server(segments, demand, entry, candidate, batch)):
                    return ReplicaOption(option.part, demand.rate_rps)
    return ReplicaOption(option.part, demand.rate_rps * LESS)


def _keep_undominated(options: Sequence[ReplicaOption]) -> tuple[ReplicaOption, ...]:
    """Return the options that no smaller one matches; those that may serve all stay until their queues are solved."""
    kept: list[ReplicaOption] = []
    for option in sorted(options, key=lambda one: (one.part, -one.rate_rps)):
        last = kept[-1] if kept else ReplicaOption(0.0, 0.0)
        if option.candidates and last.candidates and option.part == last.part:
            kept[-1] = replace(last, candidates=(*last.candidates, *option.candidates))
        elif option.candidates or option.rate_rps > last.rate_rps:
            kept.append(option)
    return tuple(kept)


def _list_shares(segments: BoundingSegments, demand: Demand, entry: FleetEntry) -> Iterator[Share]:
    listed = segments.problem.estimator.shares(demand.model, entry.device)
    yield from listed
    for mig in dict.fromkeys((None, *(share.mig for share in listed))):
        for percent in segments.search_space.steps(demand.model, entry.device, mig):
            yield Share(percent, mig)


def _bound_rates(
    segments: BoundingSegments, demand: Demand, entry: FleetEntry, candidate: _Candidate
) -> Iterator[float]:
    """Yield what no replica of a kind exceeds.

    A replica forms smaller batches, too, so that of times that do not vary those of the largest batch in time say all;
    measured ones vary by batch, each in its own way.
    """
    slo, listed = demand.slo, segments.search_space.listed_batches(demand.model, entry.device, candidate.share)
    try:
        figures = batch_times(
            segments.problem.estimator, demand.model, entry.device, listed, candidate.share, candidate.processes
        )
    except InputError:
        figures = ()
    late = [planned_ms(figure, segments.problem.options.confidence) > slo.latency_ms for figure in figures]
    if figures and not any(figure.is_observed for figure in figures):
        in_time = len(late) - late[::-1].index(False) if False in late else 0
        batches = listed[in_time : in_time + 1] or listed[-1:]  # those between may be in time, too
    else:
        batches = listed
    for batch in batches:
        with suppress(InputError):
            server = _make_server(segments, demand, entry, candidate, batch)
            yield most_within_rps(server, slo.latency_ms, slo.percentile)


def _make_server(
    segments: BoundingSegments, demand: Demand, entry: FleetEntry, candidate: _Candidate, batch: int
) -> BatchServer:
    """Return how a replica takes its batches: no slower than whatever it stands beside."""
    device, problem = entry.device, segments.problem
    workload = Workload(demand.model, batch, candidate.share, candidate.processes)
    server = segments.undisturbed_server(device, workload)
    if candidate.is_alone or not isinstance(problem.estimator, SlowingEstimator):
        return server
    sizes = range(1, batch + 1)
    figures = batch_times(problem.estimator, demand.model, device, sizes, candidate.share, candidate.processes)
    slowed = (problem.estimator.slow_beside_any(device, one) for one in figures)
    planned = (planned_ms(one, problem.options.confidence) for one in slowed)
    return replace(server, latency_ms=tuple(ms + problem.options.host.handover_ms for ms in planned))
