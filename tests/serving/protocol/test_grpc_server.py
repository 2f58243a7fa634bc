"""The server of grpcio by itself, before a router that has no worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
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
