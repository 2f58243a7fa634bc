"""Compressed bodies of HTTP: read as what they were compressed from, and never more than there is memory for."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from gpuprof.domain.deployment import PublicName
from gpuprof.serving.protocol.http_api import HttpApi, HttpConnection
from gpuprof.serving.protocol.inference_service import MAX_TEXT_BYTES, refuse_long_text
from gpuprof.serving.router.router import Router
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, StageTimes
from tests.serving.protocol.test_http_api import HeldTransport, send_bytes

Compress = Callable[[bytes], bytes]
COMPRESS: list[tuple[str, Compress]] = [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress)]
WIDTH = 50_000
MAX_BODY_BYTES = 1 << 20


class EchoModel:
    """Gives back its input, a large tensor in the arena, where nothing else lies, and counts its requests."""

    def __init__(self, arena: Arena) -> None:
        self.public, self.name = PublicName("m", "1"), "m/1"
        inputs, outputs = ((TensorSpec(letter, "FP32", (-1, WIDTH)),) for letter in "xy")
        self.spec = ModelSpec("m", "1", "test", inputs, outputs, 4)
        self.tracer: object = None
        self.waiting: list[Inference] = []
        self.requests = 0
        self._arena = arena

    def limit_deadline_ms(self, timeout_ms: float | None) -> float:
        return timeout_ms or 500.0

    def refuse_early(self, *_: object) -> None:
        raise AssertionError("what a compressed body asks is not known before it has been inflated")

    def submit(self, inference: Inference) -> None:
        self.waiting.append(inference)
        self.requests += 1

    def answer(self) -> None:
        while self.waiting:
            inference = self.waiting.pop()
            (tensor,) = inference.inputs
            assert isinstance(tensor.data, tuple)
            assert inference.slot is not None and self._arena.used == inference.slot.size
            value = bytes(self._arena.view(*tensor.data))
            inference.release(self._arena)
            inference.times = StageTimes()
            inference.on_done(inference, [OutputTensor(0, tensor.shape, value)], None)


class Site:
    """A server of one model, and one connection to it."""

    def __init__(self, buffer_bytes: int = 1 << 23) -> None:
        self.arena = Arena(buffer_bytes, poison=True)
        router = Router(self.arena)
        self.api = HttpApi(router, ServerSettings(max_body_bytes=MAX_BODY_BYTES))
        self.model = EchoModel(self.arena)
        router.publish(cast(Any, [self.model]))
        self.connection, self.transport = HttpConnection(self.api), HeldTransport()
        self.connection.connection_made(self.transport)

    async def ask(self, body: bytes, *lines: str, is_chunked: bool = False) -> bytes:
        """Return the answer to a request, sent in pieces."""
        began = len(self.transport.written)
        framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
        head = "\r\n".join(["POST /v2/models/m/infer HTTP/1.1", "Host: x", *lines, framing, "", ""]).encode()
        send_bytes(self.connection, head)
        send_bytes(self.connection, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
        while len(self.transport.written) == began:
            await asyncio.sleep(0.001)
            self.model.answer()
        self.transport.send(self.connection)
        return self.transport.written[began:]


#: Values that hardly shrink, so that the body is received in the arena, and some that shrink to little.
RANDOM, VALUES = Random(0).randbytes(4 * WIDTH), bytes(range(250)) * (4 * WIDTH // 250)
ENTRY = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "parameters": {"binary_data_size": len(VALUES)}}
TEXT = json.dumps({"inputs": [ENTRY], "parameters": {"binary_data_output": True}}).encode()
HEADER = f"Inference-Header-Content-Length: {len(TEXT)}"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("coding", "compress"), COMPRESS)
def test_a_compressed_body_is_read_as_what_it_was_compressed_from(
    coding: str, compress: Compress, is_chunked: bool
) -> None:
    async def scene() -> None:
        site = Site()
        for times in range(1, 4):
            values = (VALUES, RANDOM)[times % 2]
            body = compress(TEXT + values)
            answer = await site.ask(body, f"Content-Encoding: {coding}", HEADER, is_chunked=is_chunked)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(values)
            assert site.model.requests == times and site.arena.used == 0
            if is_chunked:  # which ends the connection
                return

    asyncio.run(scene())


BOMB = bytes(MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    ("coding", "body", "status", "text"),
    [
        ("gzip", gzip.compress(BOMB), 413, b"larger than"),
        ("gzip", gzip.compress(bytes(100)) * 2, 400, b"not compressed as one piece"),
        ("gzip", gzip.compress(VALUES)[:-9], 400, b"not compressed as one piece"),
        ("deflate", zlib.compress(VALUES)[:2] + bytes(9), 400, b"cannot be inflated"),
        ("gzip", TEXT + VALUES, 400, b"not compressed as its headers say"),
        ("gzip", gzip.compress(TEXT[:-5]), 400, b"at most Content-Length"),
        ("br", gzip.compress(TEXT + VALUES), 415, b"by gzip or deflate"),
        ("gzip, gzip", gzip.compress(gzip.compress(TEXT + VALUES)), 415, b"by gzip or deflate"),
    ],
    # What is compressed holds the time at which it was.
    ids=["bomb", "two pieces", "cut off", "no deflate", "no gzip", "too short", "br", "twice"],
)
def test_what_cannot_be_inflated_is_refused_and_leaves_nothing(
    coding: str, body: bytes, status: int, text: bytes
) -> None:
    async def scene() -> None:
        site = Site()
        answer = await site.ask(body, f"Content-Encoding: {coding}", HEADER)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and text in answer
        assert site.arena.used == 0 and not site.model.requests

    asyncio.run(scene())


def test_a_text_that_is_too_long_is_not_read() -> None:
    refuse_long_text(MAX_TEXT_BYTES)
    with pytest.raises(RefusedError, match="send tensors as binary data"):
        refuse_long_text(MAX_TEXT_BYTES + 1)
