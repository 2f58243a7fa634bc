"""OpenTelemetry traces: a span for each request and for each of its stages, sent by OTLP over HTTP.

Spans are made when a request is answered, from times that are measured anyway, so that requests outside the sample
cost next to nothing. The durations of stages are measured; the worker's stages are drawn in sequence from the start
of the batch at the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuprof.errors import InputError, UnavailableError, install_hint
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.watch.logs import LOGGER

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_EXPORT_S = 5.0
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
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1000 * _EXPORT_S))
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
        self._provider.force_flush(int(1000 * _EXPORT_S))
        self._provider.shutdown()

    def _times(self, inference: Inference) -> tuple[int, int]:
        """Return now and the arrival in nanoseconds since the epoch."""
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

    Parameters
    ----------
    url : str
        ``http://host:4318``; a path is used unchanged.
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
    return SpanTracer(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S))
