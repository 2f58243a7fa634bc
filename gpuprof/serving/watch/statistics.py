"""Counts, stage times and latencies since the server started, and spans of requests for OpenTelemetry."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuprof.errors import InputError, UnavailableError, install_hint
from gpuprof.runtime.module_command import REACTION_S
from gpuprof.serving.transport.inference import Inference, RefusedError, StageTimes
from gpuprof.serving.watch.logs import LOGGER

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

#: Upper ends of the latency histogram's buckets in milliseconds: 0.1, 0.2, 0.5, 1 and so on to 50,000.
BUCKETS_MS = tuple(float(f"{lead}e{power}") for power in range(-1, 5) for lead in "125")
STAGES = ("queue", "gather", "infer", "scatter")


@dataclass(slots=True)
class BatchStatistics:
    """Batches of a size: their number, and nanoseconds of gathering, of the model and of scattering."""

    count: int = 0
    gather: int = 0
    infer: int = 0
    scatter: int = 0


@dataclass(slots=True)
class ModelStatistics:
    """Counts of a model, or of a replica."""

    arrived: int = 0  #: Requests received, with any outcome.
    #: ``answered``, ``in_slo``, ``failed``, ``refused``: Numbers of requests; ``in_slo``: answered within their
    #: deadline (goodput).
    answered: int = 0
    in_slo: int = 0
    failed: int = 0
    refused: int = 0
    rows: int = 0  #: Inferences, a request of n rows counting n.
    batches: dict[int, BatchStatistics] = field(default_factory=dict)  #: Batches by number of rows.
    total_ns: int = 0  #: Time from arrival to answer, of the answered requests.
    failed_ns: int = 0  #: Time from arrival to the error, of the failed requests.
    stages: StageTimes = field(default_factory=StageTimes)  #: Sums over the answered requests.
    last_ms: int = 0  #: Milliseconds since the epoch of the last answer.
    #: Answers by latency: `BUCKETS_MS`, and a last bucket for the rest.
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))
    #: Answers by the time spent in each of `STAGES`.
    stage_buckets: dict[str, list[int]] = field(
        default_factory=lambda: {stage: [0] * (len(BUCKETS_MS) + 1) for stage in STAGES}
    )
    retried: int = 0  #: Requests sent again because their worker died.

    def add_batch(self, rows: int, requests: int, gather: int, infer: int, scatter: int) -> None:
        """Count a batch, whose times apply to each of its requests."""
        statistics = self.batches.get(rows)
        if statistics is None:
            statistics = self.batches[rows] = BatchStatistics()
        statistics.count += 1
        statistics.gather += gather
        statistics.infer += infer
        statistics.scatter += scatter
        stages, buckets = self.stages, self.stage_buckets
        stages.gather += requests * gather
        stages.infer += requests * infer
        stages.scatter += requests * scatter
        buckets["gather"][bisect_left(BUCKETS_MS, gather / 1e6)] += requests
        buckets["infer"][bisect_left(BUCKETS_MS, infer / 1e6)] += requests
        buckets["scatter"][bisect_left(BUCKETS_MS, scatter / 1e6)] += requests

    def add_answer(self, rows: int, total_ns: int, queue_ns: int, in_slo: bool, now_ms: int) -> None:
        """Count an answered request."""
        self.answered += 1
        self.in_slo += in_slo
        self.rows += rows
        self.total_ns += total_ns
        self.stages.queue += queue_ns
        self.last_ms = now_ms
        self.buckets[bisect_left(BUCKETS_MS, total_ns / 1e6)] += 1
        self.stage_buckets["queue"][bisect_left(BUCKETS_MS, queue_ns / 1e6)] += 1

    def add(self, other: ModelStatistics) -> None:
        """Add the counts of another."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_ms = max(self.last_ms, other.last_ms)
        for size, source in list(other.batches.items()):
            target = self.batches.setdefault(size, BatchStatistics())
            for name in ("count", "gather", "infer", "scatter"):
                setattr(target, name, getattr(target, name) + getattr(source, name))
        for stage in STAGES:
            setattr(self.stages, stage, getattr(self.stages, stage) + getattr(other.stages, stage))
            _add_up(self.stage_buckets[stage], other.stage_buckets[stage])
        _add_up(self.buckets, other.buckets)


_COUNTS = ("arrived", "answered", "in_slo", "failed", "refused", "rows", "total_ns", "failed_ns", "retried")


def sum_statistics(parts: Iterable[ModelStatistics]) -> ModelStatistics:
    """Return the sum of several statistics."""
    total = ModelStatistics()
    for part in parts:
        total.add(part)
    return total


def _add_up(totals: list[int], counts: list[int]) -> None:
    for position, count in enumerate(counts):
        totals[position] += count


@dataclass(frozen=True, slots=True)
class ProtocolFigures:
    """Counts of the protocols, in addition to the router's."""

    #: Refusals by protocol, the HTTP status of their reason, and the reason.
    refusals: Mapping[tuple[str, int, str], int]
    turned_away: int  #: Connections beyond the bound.
    edge_restarts: int | None = None  #: Restarts of the edge; None: no edge.


_WORKER_STAGES = ("gather", "infer", "scatter")


class SpanTracer:
    """Makes spans of requests, and exports those that ``OTEL_TRACES_SAMPLER`` samples, by default all."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not at exit: `close` ends it after the last answer, and waits for the collector for a limited time.
        resource = Resource.create({"service.name": "gpuprof"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1000 * REACTION_S))
        self._tracer = self._provider.get_tracer("gpuprof.serving")
        self._propagator = TraceContextTextMapPropagator()

    def record_answer(self, model: str, inference: Inference) -> None:
        """Make the spans of an answered request: itself, its wait, and the stages in its worker."""
        now_ns, arrived_ns = self._times(inference)
        span = self._begin(model, inference, arrived_ns)
        if span.is_recording():
            in_slo = now_ns - arrived_ns <= 1e6 * inference.deadline_ms
            span.set_attributes({"gpuprof.replica": inference.replica, "gpuprof.in_slo": in_slo})
            begin = self._stage(span, "queue", arrived_ns, inference.times.queue)
            for stage in _WORKER_STAGES:
                begin = self._stage(span, stage, begin, getattr(inference.times, stage))
        span.end(now_ns)

    def record_refusal(self, model: str, inference: Inference, refusal: RefusedError) -> None:
        """Make the span of a request without an answer."""
        from opentelemetry.trace import Status, StatusCode

        now_ns, arrived_ns = self._times(inference)
        span = self._begin(model, inference, arrived_ns)
        span.set_attribute("http.response.status_code", int(refusal.status))
        span.set_status(Status(StatusCode.ERROR, refusal.message))
        span.end(now_ns)

    def close(self) -> None:
        """Send the remaining spans; gives up after a few seconds."""
        self._provider.force_flush(int(1000 * REACTION_S))
        self._provider.shutdown()

    def _times(self, inference: Inference) -> tuple[int, int]:
        """Return the current time and the arrival, in nanoseconds since the epoch."""
        now_ns = time.time_ns()
        return now_ns, now_ns - int(1e9 * (time.monotonic() - inference.arrived))

    def _begin(self, model: str, inference: Inference, arrived_ns: int) -> Span:
        from opentelemetry.trace import SpanKind

        carrier = {"traceparent": inference.traceparent} if inference.traceparent else {}
        attributes: Mapping[str, str | int | float] = {
            "gpuprof.model": model,
            "gpuprof.rows": inference.rows,
            "gpuprof.attempts": inference.attempts,
            "gpuprof.deadline_ms": inference.deadline_ms,
        }
        return self._tracer.start_span(
            f"infer {model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=arrived_ns,
        )

    def _stage(self, parent: Span, name: str, begin_ns: int, took_ns: int) -> int:
        from opentelemetry.trace import set_span_in_context

        end_ns = begin_ns + took_ns
        self._tracer.start_span(name, context=set_span_in_context(parent), start_time=begin_ns).end(end_ns)
        return end_ns


def otlp_tracer(url: str) -> SpanTracer:
    """Return a tracer that sends to a collector.

    Raises `InputError` for an invalid address; `UnavailableError` when OpenTelemetry is not installed.

    ``url``: ``http://host:4318``; a path is used unchanged.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"cannot read the address of the collector {url!r}", "write http://127.0.0.1:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise UnavailableError("traces need OpenTelemetry", install_hint("trace")) from None
    endpoint = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"
    # An unreachable collector is a line in the server's log, without a traceback.
    otlp_logger = logging.getLogger("opentelemetry")
    otlp_logger.handlers[:], otlp_logger.propagate = LOGGER.handlers, False
    return SpanTracer(OTLPSpanExporter(endpoint=endpoint, timeout=REACTION_S))
