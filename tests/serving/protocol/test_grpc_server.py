"""The server of grpcio by itself, before a router that has no worker."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import pytest

from gpuprof.errors import InputError
from gpuprof.serving.protocol.grpc_server import GrpcServer
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.security import Security
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

TOKEN = "a-token-of-the-tests-0123456789"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


#: Status and reason of what servers refused.
REFUSED: list[tuple[int, str]] = []


def note_refusal(refusal: RefusedError) -> None:
    REFUSED.append((refusal.status.value, refusal.reason))


@asynccontextmanager
async def serving(security: Security, per_peer: int) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    arena = Arena(1 << 20)
    REFUSED.clear()
    server = GrpcServer(
        Router(arena), 1 << 20, security, shared=ProtocolParts(count_refusal=note_refusal), per_peer=per_peer
    )
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.close()
    assert arena.used == 0
    arena.close()


def run(test: Callable[[GrpcServer, Any], Coroutine[Any, Any, None]], security: Security, per_peer: int = 100) -> None:
    async def main() -> None:
        async with serving(security, per_peer) as (server, channel):
            await test(server, channel)

    asyncio.run(main())


async def code_of(call: Any) -> grpc.StatusCode:
    with suppress(grpc.RpcError):
        await call
    return await call.code()


def test_a_message_that_does_not_arrive_in_time_ends_its_call() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        call = channel.stream_unary(INFER)(timeout=30)
        await call.wait_for_connection()
        for _ in range(500):
            await server.watch(time.monotonic() + 1000.0)
            if call.done():
                break
            await asyncio.sleep(0.02)
        assert await code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "has not arrived within" in await call.details()

    run(test, Security())


def test_without_the_token_nothing_is_received_and_nothing_told_but_that_the_server_lives() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        for path in (INFER, REFLECT, WATCH, "/a/b"):
            call = channel.stream_stream(path)(timeout=30)  # which never sends a message
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
        for path in (LIVE, CHECK):
            await channel.unary_unary(path)(b"", timeout=30)
        own = (("authorization", f"Bearer {TOKEN}"),)
        assert await code_of(channel.unary_unary(INFER)(b"", metadata=own)) == grpc.StatusCode.NOT_FOUND
        assert await code_of(channel.unary_unary("/a/b")(b"", metadata=own)) == grpc.StatusCode.UNIMPLEMENTED
        twice = (*own, ("authorization", "Bearer another"))
        assert await code_of(channel.unary_unary(INFER)(b"", metadata=twice)) == grpc.StatusCode.UNAUTHENTICATED

    run(test, Security(TOKEN))


@pytest.mark.parametrize("message", [b"\xff" * 20, b"\x0a\xff", b"\x2a\x00" * 20_000])
def test_what_is_no_request_is_refused(message: bytes) -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        assert await code_of(channel.unary_unary(INFER)(message)) == grpc.StatusCode.INTERNAL

    run(test, Security())


def test_a_call_that_names_a_model_has_no_large_message() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        path = "/inference.GRPCInferenceService/ModelMetadata"
        assert await code_of(channel.unary_unary(path)(bytes(100_000))) == grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test, Security())


def test_a_port_that_is_taken_is_said() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        other = GrpcServer(Router(Arena(1 << 20)), 1 << 20)
        port = await other.start("127.0.0.1", 0)
        with pytest.raises(InputError, match=f"port {port} is taken"):
            await GrpcServer(Router(Arena(1 << 20)), 1 << 20).start("127.0.0.1", port)
        await other.close()

    run(test, Security())


def test_an_address_has_only_so_many_calls_at_once() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        calls = [channel.stream_stream(path)(timeout=30) for path in (INFER, STREAM, WATCH)]
        for call in calls:
            await call.wait_for_connection()
        for _ in range(500):
            codes = {code for call in calls if call.done() and (code := await call.code())}
            if codes:
                break
            await asyncio.sleep(0.02)
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert server.turned_away == 1
        for call in calls:
            call.cancel()
        for _ in range(500):
            if (code := await code_of(channel.unary_unary(LIVE)(b""))) == grpc.StatusCode.OK:
                break
            await asyncio.sleep(0.02)  # until the server knows that they are over
        assert code == grpc.StatusCode.OK

    run(test, Security(), per_peer=2)


def test_of_an_address_with_too_many_connections_the_newest_are_closed() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        closed: list[asyncio.Future[None]] = []
        try:
            for admitted in (40, 60):  # those of the first round stay
                for _ in range(40):
                    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                    opened.append((reader, writer))
                    writer.write(PREFACE)
                    assert await reader.read(1 << 16)  # now it is the server's
                await becomes(partial(has_admitted, server, admitted))
            await becomes(lambda: server.turned_away == 20)
            closed = [asyncio.ensure_future(_closes(reader)) for reader, _ in opened]
            await asyncio.wait(closed[60:], timeout=20.0)
            assert [one.done() for one in closed] == [False] * 60 + [True] * 20
        finally:
            for one in closed:
                one.cancel()
            for _, writer in opened:
                writer.close()

    run(test, Security(), per_peer=60)


def has_admitted(server: GrpcServer, count: int) -> bool:
    return len(server._connections._admitted) == count


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for half a minute at most."""
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    assert condition()


def test_what_is_refused_is_counted_by_its_reason() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        assert await code_of(channel.unary_unary(INFER)(b"")) == grpc.StatusCode.UNAUTHENTICATED
        told = (("authorization", f"Bearer {TOKEN}"),)
        assert await code_of(channel.unary_unary(INFER)(b"\x0a\1m", metadata=told)) == grpc.StatusCode.NOT_FOUND
        path = "/inference.GRPCInferenceService/ModelMetadata"
        assert await code_of(channel.unary_unary(path)(b"\x0a\1m", metadata=told)) == grpc.StatusCode.NOT_FOUND
        stream = channel.stream_stream(STREAM)(metadata=told)
        await stream.write(b"\x0a\1m")
        assert await stream.read()
        assert [(401, "unauthorized"), *[(404, "not found")] * 3] == REFUSED
        stream.cancel()

    run(test, Security(token=TOKEN))


def test_a_connection_that_sends_nothing_but_control_frames_is_closed_and_others_go_on() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        settings = struct.pack(">HI", 4, 65_535) * 100
        frames = (len(settings).to_bytes(3, "big") + b"\4\0\0\0\0\0" + settings) * 50
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE)
        sent, until = 0, time.monotonic() + 60.0
        try:
            with suppress(ConnectionError):
                while time.monotonic() < until:
                    writer.write(frames)
                    sent += len(frames)
                    await writer.drain()
                    await asyncio.sleep(0)
            assert sent > 1 << 17
            await becomes(lambda: REFUSED == [(429, "control frames")])
            assert await code_of(channel.unary_unary(LIVE)(b"")) == grpc.StatusCode.OK
        finally:
            writer.close()

    run(test, Security())


def head_of_many_fields(count: int, ends: bool) -> bytes:
    """Return the frames of a call whose head has so many fields, each but the first a byte long."""
    texts = (":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "x"), ("te", "trailers")
    own = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in (*texts, ("content-type", "application/grpc"))
    )
    block = own + b"\x40\1a\1b" + b"\xbe" * count  # kept in the table, and named from there again and again
    return len(block).to_bytes(3, "big") + bytes((1, 5 if ends else 0)) + b"\0\0\0\1" + block


@pytest.mark.parametrize("ends", [True, False])
def test_a_head_with_too_many_fields_is_refused_and_others_go_on(ends: bool) -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE + head_of_many_fields(600, ends))  # and never acknowledges the server's settings
        await writer.drain()
        if not ends:
            writer.close()
        await becomes(lambda: REFUSED == [(431, "header fields")])
        writer.close()
        fields = tuple(("a", "b") for _ in range(100))
        for _ in range(50):  # each head counts by itself
            assert await code_of(channel.unary_unary(LIVE)(b"", metadata=fields)) == grpc.StatusCode.OK

    run(test, Security())


async def _closes(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
