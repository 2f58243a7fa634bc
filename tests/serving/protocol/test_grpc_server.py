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
from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, PREFACE
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
REFLECT, REFLECT_ALPHA = (f"/grpc.reflection.{v}.ServerReflection/ServerReflectionInfo" for v in ("v1", "v1alpha"))
CHECK, WATCH, LIST = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
#: A HealthCheckResponse on the wire.
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"

GRPC = b"application/grpc"


#: Status and reason of what servers refused.
REFUSED: list[tuple[int, str]] = []


def note_refusal(refusal: RefusedError) -> None:
    REFUSED.append((refusal.status.value, refusal.reason))


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


@asynccontextmanager
async def serving(security: Security, per_peer: int) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    arena = Arena(1 << 20)
    REFUSED.clear()
    server = GrpcServer(
        Router(arena), 1 << 20, security, shared=ProtocolParts(count_refusal=note_refusal), per_peer=per_peer
    )
    port = await server.start("127.0.0.1", 0)
    # grpcio's server outlives the loop where it is not stopped: a later test of the process then fails, or hangs.
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel
    finally:
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


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for half a minute at most."""
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    assert condition()


def test_a_message_that_does_not_arrive_in_time_ends_its_call() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        call = channel.stream_unary(INFER)(timeout=30)
        await call.wait_for_connection()
        for _ in range(500):
            server.watch(time.monotonic() + 1000.0)
            if call.done():
                break
            await asyncio.sleep(0.02)
        assert await code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "has not arrived within" in await call.details()

    run(test, Security())


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_call_whose_message_finds_no_memory_ends_and_leaves_nothing(path: str) -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        call = channel.stream_stream(path)(timeout=30)
        await becomes(lambda: bool(server._reader._receiving))
        server._reader._end_slowest()
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no memory" in await call.details()
        await becomes(lambda: not server._reader._receiving and not server._limits._peers.has("127.0.0.1"))
        assert len(REFUSED) == 1

    run(test, Security())


def test_without_the_token_nothing_is_received_and_nothing_told_but_that_the_server_lives() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        for path in (INFER, REFLECT, REFLECT_ALPHA, WATCH, LIST, "/a/b"):
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
        try:
            with pytest.raises(InputError, match=f"port {port} is taken"):
                await GrpcServer(Router(Arena(1 << 20)), 1 << 20).start("127.0.0.1", port)
        finally:
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


def test_an_address_that_has_as_many_calls_as_it_may_is_told_of_health() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        calls = [channel.stream_stream(path)(timeout=30) for path in (INFER, STREAM)]
        for call in calls:
            await call.wait_for_connection()
        await becomes(lambda: server.turned_away == 1)
        for path in (LIVE, CHECK):
            assert await code_of(channel.unary_unary(path)(b"")) == grpc.StatusCode.OK
        for call in calls:
            call.cancel()

    run(test, Security(), per_peer=1)


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


def test_health_is_listed_and_checked_by_service() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        entry = b"\x12" + bytes([len(SERVING)]) + SERVING
        name = b"inference.GRPCInferenceService"
        entries = {b"\x0a\0" + entry, b"\x0a" + bytes([len(name)]) + name + entry}
        listed = await channel.unary_unary(LIST)(b"", timeout=30)
        assert len(listed) == sum(2 + len(one) for one in entries)
        assert all(b"\x0a" + bytes([len(one)]) + one in listed for one in entries)
        assert await channel.unary_unary(CHECK)(b"\x0a" + bytes([len(name)]) + name, timeout=30) == SERVING
        assert await code_of(channel.unary_unary(CHECK)(b"\x0a\x01x", timeout=30)) == grpc.StatusCode.NOT_FOUND

    run(test, Security())


def test_everybody_who_watches_health_is_told_of_changes_though_another_has_left() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        watching = [channel.unary_stream(WATCH)(request, timeout=30) for request in (b"", b"", b"\x0a\x01x")]
        assert [await call.read() for call in watching] == [SERVING, SERVING, SERVICE_UNKNOWN]
        watching.pop(0).cancel()
        await becomes(lambda: server._limits._peers._counts["127.0.0.1"] == 2)
        for status in (NOT_SERVING, SERVING):
            server._router.draining = status == NOT_SERVING
            server.watch(time.monotonic())
            assert await watching[0].read() == status
        await server.stop(30.0)
        assert await watching[0].read() == NOT_SERVING
        assert [await call.read() for call in watching] == [grpc.aio.EOF] * 2

    run(test, Security())


def test_who_watches_health_and_reads_nothing_does_not_keep_others_from_being_told() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        _, blocked = await asyncio.open_connection("127.0.0.1", server.port)
        no_window = frame(4, 0, 0, b"\0\4\0\0\0\0")
        fields = (b":path", WATCH.encode()), (b":authority", b"x"), (b"te", b"trailers"), (b"content-type", GRPC)
        head = b"\x83\x86" + b"".join(bytes([0, len(name)]) + name + bytes([len(of)]) + of for name, of in fields)
        blocked.write(PREFACE + no_window + frame(4, 1, 0) + frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5)))
        await becomes(lambda: server._limits._peers.has("127.0.0.1") and not server._reader._receiving)
        watching = channel.unary_stream(WATCH)(b"", timeout=30)
        assert await watching.read() == SERVING
        server._router.draining = True
        server.watch(time.monotonic())
        assert await watching.read() == NOT_SERVING
        blocked.close()

    run(test, Security())


def test_both_versions_of_reflection_describe_every_service_and_each_other() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        services = {path[1:].rpartition("/")[0].encode() for path in (INFER, CHECK, REFLECT, REFLECT_ALPHA)}
        for path in (REFLECT, REFLECT_ALPHA):
            asked = channel.stream_stream(path)(timeout=30)
            await asked.write(b"\x3a\x01*")  # list_services
            listed = await asked.read()
            assert all(b"\x0a" + bytes([len(service)]) + service in listed for service in services)
            for service in services:
                await asked.write(b"\x22" + bytes([len(service)]) + service)  # file_containing_symbol
                package = service.rpartition(b".")[0]
                assert b"\x12" + bytes([len(package)]) + package in await asked.read()
            asked.cancel()

    run(test, Security())


def test_a_stream_on_which_nothing_is_asked_does_not_hold_up_the_end_of_the_server() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        call = channel.stream_stream(STREAM)(timeout=30)
        await call.write(b"\x0a\x01x")  # model_name
        assert b"unknown model" in await call.read()
        await asyncio.wait_for(server.stop(1e6), 20.0)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the server is stopping"

    run(test, Security())


def test_a_client_that_answers_no_ping_does_not_hold_up_the_end_of_the_server() -> None:
    async def test(server: GrpcServer, channel: Any) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE + frame(4, 0, 0) + ACKNOWLEDGEMENT)
        await reader.readexactly(9)
        began = asyncio.get_running_loop().time()
        await server.stop(1e6)
        await server.close()
        assert asyncio.get_running_loop().time() - began < 15.0
        writer.close()

    run(test, Security())
