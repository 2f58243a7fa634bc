"""Predicts the replicas of a placement and the models that they serve together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.deployment import ModelPrediction, Replica, ReplicaPrediction
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.placement.placement import PlacedGpu, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.rules.host_work import LoadedReplica, disturb_servers

Interval = tuple[float, float]
_CALM: Mapping[PlacedReplica, BatchServer] = {}


@dataclass(frozen=True, slots=True)
class Stream:
    """The part of a model's requests that one replica answers: a split Poisson stream stays Poisson."""

    rate_rps: float
    sojourn: Sojourn


class Predictor:
    """Predicts on the means, whatever confidence was planned with; the intervals tell the rest."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._segments = Segments(replace(problem, options=replace(problem.options, confidence=None)))
        self._sojourns: dict[tuple[float, BatchServer], Sojourn] = {}
        self._streams: dict[str, list[Stream]] = {}
        self._goodput: dict[str, float] = {}

    def disturbances(self, gpus: Sequence[PlacedGpu]) -> dict[PlacedReplica, BatchServer]:
        """Return the replicas of a placement whose batches the router and its like disturb, as they then are.

        They do where one machine is all there is; see `gpuprof.rules.host_work`.
        """
        work = self._problem.options.host
        if not work.disturbs or len(gpus) != 1:
            return {}
        device = self._problem.device(gpus[0].device)
        placed = [(one, part.beside(one)) for part in gpus[0].partitions for one in part.replicas]
        running = [
            LoadedReplica(self._calm(device, one, beside), one.rate_rps, one.workload.share.sm_pct)
            for one, beside in placed
        ]
        found = disturb_servers(work, running, self._problem.queueing)
        return {one: server for (one, _), server in zip(placed, found, strict=True)}

    def _calm(self, device: Device, placed: PlacedReplica, beside: Sequence[Workload]) -> BatchServer:
        server = self._segments.undisturbed(device, placed.workload, beside)
        return replace(server, max_wait_ms=placed.max_wait_ms)

    def replica(
        self,
        device: Device,
        placed: PlacedReplica,
        beside: Sequence[Workload],
        disturbances: Mapping[PlacedReplica, BatchServer] = _CALM,
    ) -> Replica:
        """Return the replica as the map has it, with ``beside`` running on the same device."""
        estimate = self._segments.estimate(device, placed.workload, beside)
        prediction = ReplicaPrediction(
            latency_ms=estimate.latency_ms.value,
            latency_ms_interval=_interval(estimate.latency_ms),
            latency_cv=estimate.latency_cv,
            pause_factor=estimate.pause_factor,
            pause_cv=estimate.pause_cv,
            throughput_rps=estimate.throughput_rps.value,
            throughput_rps_interval=_interval(estimate.throughput_rps),
            goodput_rps=min(placed.rate_rps, estimate.throughput_rps.value),
            utilization=placed.rate_rps / estimate.throughput_rps.value,
            source=estimate.latency_ms.source,
        )
        latencies = None
        if self._problem.options.latency_budget is None:
            calm = self._calm(device, placed, beside)
            latencies = calm.latency_ms
            prediction = self._queued(prediction, placed, disturbances.get(placed, calm), estimate)
        self._goodput[placed.model] = self._goodput.get(placed.model, 0.0) + prediction.goodput_rps
        return Replica(
            model=placed.model,
            batch=placed.batch,
            processes=placed.processes,
            sm_share_pct=placed.share.sm_pct,
            memory_limit_bytes=placed.memory_bytes,
            max_wait_ms=placed.max_wait_ms,
            rate_rps=placed.rate_rps,
            batch_latency_ms=latencies,
            predicted=prediction,
        )

    def model(self, name: str) -> ModelPrediction:
        """Return what is predicted of a model over the replicas predicted so far."""
        streams = self._streams.get(name, [])
        return ModelPrediction(
            goodput_rps=self._goodput.get(name, 0.0),
            p50_ms=percentile_over(streams, 50.0),
            p95_ms=percentile_over(streams, 95.0),
            p99_ms=percentile_over(streams, 99.0),
        )

    def _queued(
        self, prediction: ReplicaPrediction, placed: PlacedReplica, server: BatchServer, estimate: Estimate
    ) -> ReplicaPrediction:
        sojourn = self._sojourn(placed.rate_rps, server)
        self._streams.setdefault(placed.model, []).append(Stream(placed.rate_rps, sojourn))
        ends = [self._sojourn(placed.rate_rps, end) for end in _at_ends(server, estimate.latency_ms)]
        limit = self._problem.demand(placed.model).slo.latency_ms
        return prediction.model_copy(
            update={
                "p50_ms": _finite(sojourn.percentile(50.0)),
                "p95_ms": _finite(sojourn.percentile(95.0)),
                "p99_ms": _finite(sojourn.percentile(99.0)),
                "p99_ms_interval": _between(ends, lambda s: s.percentile(99.0)),
                "goodput_rps": placed.rate_rps * sojourn.fraction_within(limit),
                "goodput_rps_interval": _between(ends[::-1], lambda s: placed.rate_rps * s.fraction_within(limit)),
                "utilization": sojourn.utilization,
            }
        )

    def _sojourn(self, rate_rps: float, server: BatchServer) -> Sojourn:
        key = (rate_rps, server)
        if key not in self._sojourns:
            self._sojourns[key] = self._problem.queueing.sojourn(Arrivals(rate_rps), server)
        return self._sojourns[key]


def percentile_over(streams: Sequence[Stream], percent: float) -> float | None:
    """Return the time within which ``percent`` of the requests of all streams are answered, None without any."""
    total = sum(stream.rate_rps for stream in streams)
    if not total:
        return None
    own = [stream.sojourn.percentile(percent) for stream in streams]
    low, high = min(own), max(own)
    if math.isinf(high):
        return None
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        within = sum(stream.rate_rps * stream.sojourn.fraction_within(middle) for stream in streams)
        low, high = (low, middle) if within >= total * percent / 100.0 else (middle, high)
    return high


def _at_ends(server: BatchServer, latency: Figure) -> list[BatchServer]:
    """Return the server at the lower and the upper end of its time's interval; none where nothing is known of it."""
    if latency.low is None or latency.high is None:
        return []
    scales = (latency.low / latency.value, latency.high / latency.value)
    return [replace(server, latency_ms=tuple(scale * ms for ms in server.latency_ms)) for scale in scales]


def _between(ends: Sequence[Sojourn], of: Callable[[Sojourn], float]) -> Interval | None:
    """Return the figure at both ends; None where an end is unknown or the queue grows without bound there."""
    if not ends:
        return None
    low, high = (of(end) for end in ends)
    return None if math.isinf(low) or math.isinf(high) else (low, high)


def _interval(figure: Figure) -> Interval | None:
    return None if figure.low is None or figure.high is None else (figure.low, figure.high)


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
