"""Shares of a demand's replicas on a kind of device, and their maximum rates beside any neighbours, for bounds.

A replica in a part of a partition either shares it with neighbours, which slow it down at least as much as the
estimator's minimum for any neighbours, or leaves the rest of the partition idle and so takes all of it.
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
    """A share and processes of a replica, at any batch of the search space."""

    share: Share
    processes: int
    is_alone: bool  #: True if alone in its partition.


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """A replica of one demand on one kind of device."""

    part: float  #: Part of a device it takes.
    rate_rps: float  #: Maximum served rate, at most the demand's rate.
    #: Candidates that may serve the whole demand alone, until their queues are solved.
    candidates: tuple[_Candidate, ...] = ()


def list_options(segments: BoundingSegments, demand: Demand, entry: FleetEntry) -> tuple[ReplicaOption, ...]:
    """Return the options of a demand's replicas on a kind of device, by rising part, without dominated options."""
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
    """Return the options up to the first whose queue confirms it serves the whole demand alone."""
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
    """Return the option with its served rate: a little less than the demand where all its candidates are too late."""
    for candidate in reversed(option.candidates):  # for equal parts, a larger share is likelier to suffice
        for batch in segments.search_space.listed_batches(demand.model, entry.device, candidate.share):
            with suppress(InputError):
                if segments.serves_alone(demand, _make_server(segments, demand, entry, candidate, batch)):
                    return ReplicaOption(option.part, demand.rate_rps)
    return ReplicaOption(option.part, demand.rate_rps * LESS)


def _keep_undominated(options: Sequence[ReplicaOption]) -> tuple[ReplicaOption, ...]:
    """Return the options that no smaller option matches; options with unsolved queues stay."""
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
    """Yield upper bounds of the rate of a kind of replica.

    A replica forms smaller batches too, so predicted times are bounded by the largest batch in time alone; measured
    times vary irregularly by batch.
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
        batches = listed[in_time : in_time + 1] or listed[-1:]  # batches between listed sizes may be in time, too
    else:
        batches = listed
    for batch in batches:
        with suppress(InputError):
            server = _make_server(segments, demand, entry, candidate, batch)
            yield most_within_rps(server, slo.latency_ms, slo.percentile)


def _make_server(
    segments: BoundingSegments, demand: Demand, entry: FleetEntry, candidate: _Candidate, batch: int
) -> BatchServer:
    """Return the server of a replica: its batches are no slower than beside any neighbours."""
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
