"""Load on a server that is not ours: it answers as Triton does, in binary form and with a length of its JSON first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gpuprof
from gpuprof.errors import InputError
from gpuprof.load.closed_loop import ClosedLoop
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


def test_a_closed_loop_sends_the_steps_of_a_sequence_one_after_the_answer_to_another(
    triton: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, bodies = triton
    file = tmp_path / "data.json"
    steps = [[{"x": [float(n), 0.0, 0.0]} for n in range(length)] for length in (3, 2, 3)]
    file.write_text(json.dumps({"data": steps}))
    traffic = gpuprof.LoadTraffic(duration_s=1.0, warmup_s=0.0, concurrency={"m": 2}, input_data={"m": file})
    (row,) = gpuprof.load(url, traffic=traffic).rows()
    assert row["answered"] == row["sent"] and row["lost"] == 0
    begun: dict[int, int] = {}
    for request in bodies:
        parameters = request["parameters"]
        number = parameters["sequence_id"]
        assert parameters["sequence_start"] is (number not in begun)
        begun[number] = begun.get(number, 0) + 1
        assert len(begun) <= 2  # two at a time, none of them twice
        if parameters["sequence_end"]:
            assert begun.pop(number) == len(steps[number - 1])
    assert {request["parameters"]["sequence_id"] for request in bodies} == {1, 2, 3}
    with pytest.raises(InputError, match=r"4 sequences are to be on their way, but .* has 3"):
        gpuprof.load(url, traffic=traffic.replace(concurrency={"m": 4}))


def test_a_sequence_of_which_a_step_is_lost_begins_anew() -> None:
    loop = ClosedLoop([1], [[(0, 1, 2), (3, 4)]])
    assert loop.take(0, 0.0) == (0, 0) and loop.take(1, 0.0) is None
    loop.finish(0, 0.5, is_answered=True)
    assert loop.take(1, 0.4) is None and loop.take(1, 0.5) == (0, 1)
    loop.finish(1, 0.6, is_answered=False)
    assert loop.take(2, 1.0) == (0, 3)
    loop.finish(2, 1.0, is_answered=True)
    assert loop.take(3, 1.0) == (0, 4)
    loop.finish(3, 1.0, is_answered=True)
    assert loop.take(4, 1.0) == (0, 0)
