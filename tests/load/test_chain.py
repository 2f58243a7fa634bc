"""Requests of a chain: each answer is sent on to the next step."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target, match_outputs, read_outputs
from gpuprof.serving.transport.datatypes import TensorSpec

BOXES = np.array([[1.5, -2.0, 3.0]], np.float32)
SPECS = {
    "detector": ([["image", "FP32", [-1, 2]]], [["boxes", "FP32", [-1, 3]]]),
    "classifier": ([["crop", "FP32", [-1, 3]], ["mode", "INT64", [-1]]], [["class", "INT64", [-1]]]),
}


class _Steps(BaseHTTPRequestHandler):
    """Answers as a server of two models, and records the inputs of the second; every tenth of these is refused."""

    protocol_version = "HTTP/1.1"
    received: list[bytes]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        model = self.path.split("/")[3] if self.path.startswith("/v2/models/") else ""
        if self.path.endswith("/stats") or model not in SPECS:
            self._answer(404, b"{}")
            return
        inputs, outputs = (
            [dict(zip(("name", "datatype", "shape"), spec, strict=True)) for spec in specs] for specs in SPECS[model]
        )
        self._answer(200, json.dumps({"inputs": inputs, "outputs": outputs}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "detector" in self.path:
            size = {"binary_data_size": BOXES.nbytes}
            output = {"name": "boxes", "datatype": "FP32", "shape": [1, 3], "parameters": size}
            text = json.dumps({"outputs": [output]}).encode()
            self._answer(200, text + BOXES.tobytes(), f"Inference-Header-Content-Length: {len(text)}")
            return
        self.received.append(body[int(self.headers["Inference-Header-Content-Length"]) :])
        self._answer(503 if len(self.received) % 10 == 0 else 200, b"{}")

    def _answer(self, status: int, body: bytes, header: str = "X: y") -> None:
        name, _, value = header.partition(": ")
        self.send_response(status)
        self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def target() -> Iterator[Target]:
    _Steps.received = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Steps)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Target("127.0.0.1", server.server_port)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("concurrency", [None, 2])
def test_outputs_that_fit_are_the_inputs_of_the_next_step_and_a_refusal_there_is_one_of_the_chain(
    target: Target, concurrency: int | None
) -> None:
    steps = tuple(RequestStream(name, 50.0, 1000.0) for name in SPECS)
    stream = RequestStream("vision", 50.0, 60_000.0, concurrency=concurrency, steps=steps)
    (result,) = run_load(target, [stream], LoadSettings(1.0, 0.0)).results
    assert result.sent == len(_Steps.received) > 10
    assert {body[: BOXES.nbytes] for body in _Steps.received} == {BOXES.tobytes()}
    assert len({body[BOXES.nbytes :] for body in _Steps.received}) > 1  # what fits no output is random
    assert result.refused == len(_Steps.received) // 10
    assert result.answered + result.refused == result.sent


def test_an_output_goes_to_the_input_of_its_name_before_others_of_its_shape() -> None:
    outputs = [TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "FP32", (-1, 3)), TensorSpec("c", "INT64", (-1,))]
    inputs = [TensorSpec("x", "FP32", (-1, 3)), TensorSpec("a", "FP32", (-1, -1)), TensorSpec("y", "FP32", (-1, 4))]
    assert match_outputs(outputs, inputs) == {"a": "a", "x": "b"}
    assert match_outputs(outputs, [TensorSpec("x", "FP16", (-1, 3)), TensorSpec("y", "FP32", (3,))]) == {}


def test_an_answer_without_binary_tensors_passes_nothing_on() -> None:
    assert read_outputs(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") == []
