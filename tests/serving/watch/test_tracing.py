"""OpenTelemetry traces: what a request's spans say, and that they reach a collector."""

import gzip
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.grpc as triton

from gpuprof.serving.transport.inference import Inference, RefusedError, StageTimes
from gpuprof.serving.watch.statistics import SpanTracer
from tests.serving.running import map_of, replica, running

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _never(*_: object) -> None:
    raise AssertionError


def answered_request(traceparent: str = "") -> Inference:
    """A request that came 50 ms ago: 20 ms in the queue, 1 + 25 + 2 ms in its worker."""
    times = StageTimes(20_000_000, 1_000_000, 25_000_000, 2_000_000)
    arrived = time.monotonic() - 0.05
    inference = Inference(2, [], None, arrived, 100.0, _never, _never, traceparent=traceparent)
    inference.attempts, inference.times, inference.replica = 1, times, "m/0"
    return inference


@pytest.fixture
def make_tracer() -> tuple[SpanTracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return SpanTracer(exporter), exporter


def test_a_request_has_a_span_for_each_stage(make_tracer: tuple[SpanTracer, InMemorySpanExporter]) -> None:
    tracer, exporter = make_tracer
    tracer.record_answer("m", answered_request())
    tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"infer m", "queue", "gather", "infer", "scatter"}
    whole = spans["infer m"]
    durations = {name: span.end_time - span.start_time for name, span in spans.items()}  # type: ignore[operator]
    assert (durations["queue"], durations["gather"], durations["infer"], durations["scatter"]) == (20e6, 1e6, 25e6, 2e6)
    assert 50e6 <= durations["infer m"] < 5e9
    assert spans["queue"].start_time == whole.start_time
    assert spans["infer"].start_time == spans["gather"].end_time
    assert all(span.parent == whole.context for name, span in spans.items() if name != "infer m")
    attributes = dict(whole.attributes or {})
    assert attributes["gpuprof.model"] == "m" and attributes["gpuprof.replica"] == "m/0"
    assert attributes["gpuprof.rows"] == 2 and attributes["gpuprof.in_slo"] is True


def test_a_refusal_is_an_error_without_stages(make_tracer: tuple[SpanTracer, InMemorySpanExporter]) -> None:
    tracer, exporter = make_tracer
    tracer.record_refusal("m", answered_request(), RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too much"))
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "too much"
    assert dict(span.attributes or {})["http.response.status_code"] == 503


def test_the_span_belongs_to_that_of_the_client(make_tracer: tuple[SpanTracer, InMemorySpanExporter]) -> None:
    tracer, exporter = make_tracer
    tracer.record_answer("m", answered_request(PARENT))
    tracer.record_answer("m", answered_request("rubbish"))
    tracer.close()
    first, second = (span for span in exporter.get_finished_spans() if span.name == "infer m")
    assert first.parent is not None and f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert second.parent is None


def test_what_is_not_sampled_is_not_sent_unless_the_client_traces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = SpanTracer(exporter)
    for _ in range(20):
        tracer.record_answer("m", answered_request())
    tracer.record_answer("m", answered_request(PARENT))
    tracer.close()
    assert len(exporter.get_finished_spans()) == 5


class SpanCollector(BaseHTTPRequestHandler):
    received: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    SpanCollector.received = []
    with HTTPServer(("127.0.0.1", 0), SpanCollector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_sends_its_spans_to_a_collector(tmp_path: Path, collector: str) -> None:
    document = map_of({"m": "null:4"}, [replica("m")])
    with running(tmp_path, document, "--simulate", "--otlp", collector, "--grpc-port", "0") as server:
        assert [server.infer("m", [1.0])[0] for _ in range(2)] == [200] * 2
        address = next(word for word in server.line.split() if word.startswith("grpc://")).removeprefix("grpc://")
        tensor = triton.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        with triton.InferenceServerClient(address) as client:
            client.infer("m", [tensor], headers={"traceparent": PARENT})
        code, errors = server.stop()
    assert (code, errors) == (0, "drained\n")
    assert {path for path, _ in SpanCollector.received} == {"/v1/traces"}
    spans = [
        span
        for _, request in SpanCollector.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    names = [span.name for span in spans]
    parents = sorted(span.parent_span_id.hex() for span in spans if span.name == "infer m")
    assert parents == ["", "", "b7ad6b7169203331"]
    assert names.count("infer m") == names.count("queue") == names.count("scatter") == 3
