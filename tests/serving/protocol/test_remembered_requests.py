"""Servers that remember what they read answer byte for byte as those that do not, whatever is sent in which order."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.public_name import PublicName
from gpuprof.serving.protocol.http_api import ApiSettings, HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.router.known_requests import RequestReader
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, OutputTensor
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from tests.serving.protocol.test_http_connection import HeldTransport, send_bytes

WIDTHS = (1, 2)
TOKEN = b"Bearer right"


class RememberingModel:
    """Gives back its input, later, and notes all else that a request was."""

    def __init__(self, name: str, version: str, width: int, remembers: bool) -> None:
        self.public = PublicName(name, version)
        self.name = f"{name}/{version}"
        inputs, outputs = ((TensorSpec(letter, "FP32", (-1, width)),) for letter in "xy")
        self.spec = ModelSpec(name, version, "test", inputs, outputs, 4)
        self.tracer: object = None
        self.slo_ms = 100.0
        self.waiting: list[Inference] = []
        self.noted: list[object] = []
        self._reader = RequestReader(self.spec) if remembers else None

    def read_request(self, body: RequestBody) -> InferRequest:
        return read_request(self.spec, body) if self._reader is None else self._reader.read_request(body)

    def limit_deadline_ms(self, timeout_ms: float | None) -> float:
        return timeout_ms or 500.0

    def submit(self, inference: Inference) -> None:
        self.waiting.append(inference)
        asked = inference.rows, inference.wanted, inference.deadline_ms, inference.priority, inference.batch_key
        self.noted.append((asked, inference.client, inference.traceparent))

    def answer(self) -> None:
        """Answer all that wait, the last first."""
        while self.waiting:
            inference = self.waiting.pop()
            (tensor,) = inference.inputs
            assert not isinstance(tensor.data, tuple)
            inference.on_done(inference, [OutputTensor(0, tensor.shape, bytes(tensor.data))], None)


def models_of(change: int, remembers: bool) -> list[RememberingModel]:
    """Return what is served after the change of this number: models come, go, and change their inputs."""
    models = [RememberingModel("m", "1", WIDTHS[change % 2], remembers)]
    if change % 3:
        models.append(RememberingModel("m", "2", WIDTHS[change // 2 % 2], remembers))
    if change % 4 != 1:
        models.append(RememberingModel("other", "1", 1, remembers))
    return models


class Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget it at once."""


# --- HTTP

TARGETS = (
    "/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/v2/models/m/versions/2/infer", "/v2/models/other/infer",
    "/v2/models/m/infer?a", "/V2/models/m/infer", "/v2/models/%6d/infer", "/v2/models/gone/infer",
    "http://x/v2/models/m/infer", "http://other.example/v2/models/m/infer",
)  # fmt: skip
#: Lines that make two heads nearly the same.
LINES = (
    "Host: x", "host: x", "HOST:x", "Host:  x", "Host: other.example", "Authorization: Bearer right",
    "authorization: bearer right", "Authorization: Bearer  right", "Authorization: Bearer wrong", "Connection: close",
    "connection: Keep-Alive", "X: y", "x: y", "X: y ", "X:\ty", "X : y", " folded", "traceparent: 00-1-2-03",
    "traceparent: 00-4-5-06", "Content-Encoding: gzip", "Content-Encoding: identity", "Expect: 100-continue",
    "Inference-Header-Content-Length: 3", "Transfer-Encoding: chunked", "Transfer-Encoding: identity",
    "Content-Length: 4", "Upgrade: h2c",
)  # fmt: skip


def body_of(rows: int, width: int, extra: dict[str, Any], fill: int, binary: bool) -> tuple[bytes, int]:
    """Return a body and the length of its JSON."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [rows, width]}
    if binary:
        tensor["parameters"] = {"binary_data_size": 4 * rows * width}
        text = json.dumps({"inputs": [tensor], **extra}).encode()
        return text + bytes([fill]) * (4 * rows * width), len(text)
    tensor["data"] = [float(fill)] * (rows * width)
    text = json.dumps({"inputs": [tensor], **extra}).encode()
    return text, len(text)


EXTRAS: list[dict[str, Any]] = [
    {}, {"id": "a"}, {"id": "b"}, {"parameters": {"timeout": 1000}}, {"parameters": {"priority": 1}},
    {"parameters": {"priority": 1 << 40}}, {"parameters": {"binary_data_output": True}}, {"outputs": [{"name": "y"}]},
    {"outputs": [{"name": "z"}]}, {"id": 7},
]  # fmt: skip


#: Of what a request is made, each with what it may be; what stands first is right.
HTTP_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "method": st.sampled_from(["POST", "GET", "post"]),
    "target": st.sampled_from(TARGETS),
    "rows": st.sampled_from([1, 2, 5]),
    "width": st.sampled_from(WIDTHS),
    "extra": st.sampled_from(EXTRAS),
    "fill": st.integers(0, 3),
    "binary": st.booleans(),
    "lines": st.lists(st.tuples(st.integers(0, 3), st.sampled_from(LINES)), max_size=2),
    "missing": st.sampled_from([None, 0, 1, 2]),
    "chunked": st.booleans(),
    "cut": st.sampled_from([0, 1]),
}
HTTP_BASES = st.fixed_dictionaries(
    {name: st.just(value) for name, value in (("method", "POST"), ("missing", None), ("chunked", False), ("cut", 0))}
    | {"target": st.sampled_from(TARGETS[:4]), "rows": st.just(1), "width": st.just(1), "lines": st.just([])}
    | {"extra": st.sampled_from(EXTRAS[:5]), "fill": st.integers(0, 3), "binary": st.booleans()}
)


def http_request(asked: dict[str, Any]) -> bytes:
    body, json_bytes = body_of(asked["rows"], asked["width"], asked["extra"], asked["fill"], asked["binary"])
    lines = ["Host: x", "Authorization: Bearer right"]
    if json_bytes < len(body):
        lines.append(f"Inference-Header-Content-Length: {json_bytes}")
    for place, line in asked["lines"]:
        lines.insert(place, line)
    if asked["missing"] is not None:
        del lines[min(asked["missing"], len(lines) - 1)]
    lines.append("Transfer-Encoding: chunked" if asked["chunked"] else f"Content-Length: {len(body)}")
    head = "\r\n".join([f"{asked['method']} {asked['target']} HTTP/1.1", *lines, "", ""])
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if asked["chunked"] else body
    return head.encode() + framed[: len(framed) - asked["cut"]]


def neighbours(base: dict[str, Any], choices: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return what draws requests that differ from ``base`` in one thing at most."""

    def change(name: str) -> st.SearchStrategy[dict[str, Any]]:
        return choices[name].map(lambda value: base | {name: value})

    return st.one_of(st.just(base), *map(change, choices))


#: On which connection, what, how often, cut into pieces of which size, whether what waits is answered, whether models
#: change.
HTTP_STEPS = HTTP_BASES.flatmap(
    lambda base: st.lists(
        st.tuples(
            st.integers(0, 2), neighbours(base, HTTP_CHOICES).map(http_request), st.integers(1, 3),
            st.sampled_from([1 << 16, 1 << 16, 64]), st.booleans(), st.sampled_from([False, False, False, True]),
        ),
        min_size=8,
        max_size=24,
    )
)  # fmt: skip


class HttpSide:
    """A server of HTTP that remembers what it has read, or does not."""

    def __init__(self, remembers: bool) -> None:
        self.router = Router(Arena(1 << 22))
        self.api = HttpApi(self.router, ApiSettings(1 << 20, 100, lambda value: value.lower() == TOKEN.lower(), {"x"}))
        self.router.on_change(self.api.forget_routes)
        if not remembers:
            self.api.cached_heads = Forgetful()
        self._remembers = remembers
        self._connections: dict[int, tuple[HttpConnection, HeldTransport]] = {}
        self.written: list[bytes] = []
        self.noted: list[object] = []
        self.models: list[RememberingModel] = []

    def change_models(self, change: int) -> None:
        """Serve others, while requests to those before wait."""
        self.models += (models := models_of(change, self._remembers))
        self.router.publish(cast(Any, models))

    async def ask(self, number: int, data: bytes, size: int) -> None:
        """Send bytes on a connection, a new one where that before was closed."""
        if number not in self._connections:
            self._connections[number] = HttpConnection(self.api), HeldTransport(f"10.0.0.{number}")
            self._connections[number][0].connection_made(self._connections[number][1])
        connection, _ = self._connections[number]
        for begin in range(0, len(data), size):
            send_bytes(connection, data[begin : begin + size])
            await asyncio.sleep(0)

    async def answer(self) -> None:
        """Answer what waits until nothing does."""
        for _ in range(40):
            for model in self.models:
                model.answer()
            for connection, transport in self._connections.values():
                transport.send(connection)
            await asyncio.sleep(0)
        for number, (connection, transport) in list(self._connections.items()):
            if connection._is_lingering or transport.closed:
                connection.connection_lost(None)
                self.written.append(transport.written)
                del self._connections[number]

    def outcome(self) -> tuple[object, ...]:
        """Return what was written, but for how long it took, and what models were asked."""
        every = [*self.written, *(transport.written for _, transport in self._connections.values())]
        noted = [model.noted for model in self.models]
        return [re.sub(rb"dur=[0-9.]+", b"", text) for text in every], noted, sorted(self.api._refusals.items())

    def close(self) -> None:
        """Give everything back."""
        for connection, _ in self._connections.values():
            connection.connection_lost(None)
        self.router.arena.close()


async def play_http(steps: Iterable[tuple[int, bytes, int, int, bool, bool]], remembers: bool) -> tuple[object, ...]:
    side = HttpSide(remembers)
    side.change_models(change := 0)
    for number, data, times, size, answers, changes in steps:
        await side.ask(number, times * data, size)
        if changes:
            side.change_models(change := change + 1)
        if answers:
            await side.answer()
    await side.answer()
    outcome = side.outcome()
    side.close()
    return outcome


@given(HTTP_STEPS)
def test_http_answers_are_those_of_a_server_that_remembers_nothing(steps: list[Any]) -> None:
    remembered = asyncio.run(play_http(steps, remembers=True))
    assert asyncio.run(play_http(steps, remembers=False)) == remembered


def test_what_is_played_over_http_is_mostly_answered_and_mostly_remembered() -> None:
    body, size = body_of(1, 1, {}, 1, True)
    lines = ["POST /v2/models/m/infer HTTP/1.1", "Host: x", "Authorization: Bearer right"]
    lines += [f"Inference-Header-Content-Length: {size}", f"Content-Length: {len(body)}", "", ""]
    step = (0, "\r\n".join(lines).encode() + body, 3, 1 << 16, True, False)
    written, noted, refusals = asyncio.run(play_http([step, step], remembers=True))
    assert cast(list[bytes], written)[0].count(b"200 OK") == 6 and not refusals
    assert len(cast(list[list[object]], noted)[0]) == 6
