"""Load on a server that is not ours: it answers as Triton does, in binary form and with a length of its JSON first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import gpuprof
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

TENSOR = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
OUTPUT = bytes(range(200)) * 30


class TritonAnswers(BaseHTTPRequestHandler):
    """As tritonserver's HTTP frontend: the head's order, the names of its fields, statistics without stages of ours."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one piece: no acknowledgement is waited for between them
    disable_nagle_algorithm = True
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path.endswith("/stats"):
            stages = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit")
            counts = {stage: {"count": 5, "ns": 10} for stage in stages}
            self.answer({"model_stats": [{"name": "m", "inference_stats": counts, "batch_stats": []}]})
        elif self.path.endswith("/models/m"):
            self.answer({"name": "m", "platform": "onnxruntime_onnx", "inputs": [TENSOR], "outputs": [TENSOR]})
        else:
            self.answer({"name": "triton", "version": "2.50.0"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body[: int(self.headers["Inference-Header-Content-Length"])])
        self.asked.append(request)
        output = {"name": "y", "datatype": "UINT8", "shape": [1, 6000], "parameters": {"binary_data_size": len(OUTPUT)}}
        head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        self.write(fields, head + OUTPUT)

    def answer(self, document: object) -> None:
        self.write({"Content-Type": "application/json"}, json.dumps(document).encode())

    def write(self, fields: dict[str, str], body: bytes) -> None:
        self.send_response_only(200)
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (TritonAnswers,), {"asked": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("how", [{"rates_rps": {"m": 50.0}}, {"concurrency": {"m": 2}}])
def test_answers_of_triton_are_read_whole(triton: tuple[str, list[dict[str, Any]]], how: dict[str, Any]) -> None:
    url, bodies = triton
    traffic = gpuprof.LoadTraffic(duration_s=1.5, warmup_s=0.1, **how)
    result = gpuprof.load(url, traffic=traffic)
    (row,) = result.rows()
    assert row["answered"] == row["sent"] and int(str(row["sent"])) > 3
    assert (row["lost"], row["failed"]) == (0, 0)
    assert bodies[0]["parameters"]["binary_data_output"] is True
