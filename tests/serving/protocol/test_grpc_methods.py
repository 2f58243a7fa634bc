from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, NoReturn

import pytest

from gpuprof.serving.protocol.grpc_methods import CallLimits
from gpuprof.serving.transport.inference import RefusedError


class Message:
    """What a call sent."""


class KeptContext:
    """A context that keeps what its call ended with, as grpcio's does until its garbage is collected."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50412"

    def done(self) -> bool:
        return False

    async def abort(self, code: object, details: str, trailers: object) -> NoReturn:
        self.error = RuntimeError(code, details, trailers)
        raise self.error


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_refused_message_is_freed_though_grpcio_keeps_how_its_call_ended() -> None:
    messages: list[weakref.ref[Message]] = []

    def parse(message: Message) -> NoReturn:
        try:
            raise ValueError(message)
        except ValueError:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "it is no request") from None

    async def behaviour(_: object, context: Any) -> None:
        message = Message()
        messages.append(weakref.ref(message))
        parse(message)

    reader: Any = None
    context = KeptContext()

    async def answer() -> None:
        await CallLimits(reader, 1.0, 8, lambda refusal: None).limit(behaviour)(None, context)

    with pytest.raises(RuntimeError, match="it is no request"):
        asyncio.run(answer())
    assert context.error is not None
    assert [message() for message in messages] == [None]
