"""The relay in front of grpcio: what it lets through, what it holds back, and that it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import pytest
import trustme

from bench.grpc_attacks import _frame, _head_block, _literal, _many_fields
from gpuprof.serving.protocol.begun_question import QUESTION_PATH
from gpuprof.serving.protocol.grpc_relay import Relay, RelayOrder
from gpuprof.serving.protocol.grpc_relay_link import RelayLink
from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, PREFACE
from gpuprof.serving.protocol.peer_counts import find_client, peer_of
from gpuprof.serving.protocol.protocol_figures import RelayFigures
from gpuprof.serving.transport.security import OPEN, Security
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

GREETING = PREFACE + _frame(4, 0, 0, b"")
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SETTINGS, HEADERS, DATA, PING, GOAWAY = 4, 1, 0, 6, 7


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Answers each message with itself, a megabyte, or when it may; notes the addresses of clients."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.may_answer = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == QUESTION_PATH:
            return None

        async def answer(message: bytes, context: Any) -> bytes:
            self.peers.append(peer_of(context))
            if handler_call_details.method == "/later/b":
                await self.may_answer.wait()
            return bytes(1_000_000) if handler_call_details.method == "/large/b" else message

        return grpc.unary_unary_rpc_method_handler(answer)


class Hello:
    """A connection whose TLS can begin."""

    def __init__(self, name: str, begun: list[str]) -> None:
        self.peer, self.begin_tls = name[0], partial(begun.append, name)


class Relayed:
    """A server of grpcio behind a relay."""

    def __init__(self, link: RelayLink, server: Any, echo: Echo, port: int) -> None:
        self.link, self.server, self.echo, self.port = link, server, echo, port


@asynccontextmanager
async def relayed(
    directory: Path, security: Security = OPEN, host: str = "127.0.0.1", per_peer: int = 100, stall_s: float = 30.0
) -> AsyncIterator[Relayed]:
    echo, link = Echo(), RelayLink(security, per_peer, stall_s)
    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers((echo,))
    port = link.listen(host, 0)
    server.add_insecure_port(f"unix:{directory / 'grpc'}")
    await server.start()
    try:
        link.start(directory / "grpc")
        yield Relayed(link, server, echo, port)
    finally:
        await server.stop(None)
        await link.close()
    assert not psutil.pid_exists(link.pid or 1 << 22)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120.0))


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for half a minute at most."""
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    assert condition()


async def frames_of(reader: asyncio.StreamReader, until: int) -> list[int]:
    """Return the types of the frames that come, up to the first of type ``until``, or to the end (-1)."""
    kinds = []
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while until not in kinds:
            head = await asyncio.wait_for(reader.readexactly(9), 30.0)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            kinds.append(head[3])
        return kinds
    return [*kinds, -1]


def call(number: int = 1, path: str = "/a/b") -> bytes:
    """Return the frames of a call."""
    message, head = b"abcd", _frame(HEADERS, 4, number, _head_block(path, ()))
    return head + _frame(DATA, 1, number, struct.pack(">BI", 0, len(message)) + message)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_calls_are_answered_and_know_the_address_of_their_client(tmp_path: Path, host: str) -> None:
    async def test() -> None:
        async with (
            relayed(tmp_path, host=host) as one,
            grpc.aio.insecure_channel(
                f"[{host}]:{one.port}" if ":" in host else f"{host}:{one.port}", UNLIMITED
            ) as channel,
        ):
            for size in (0, 4, 600_000, 20_000_000):
                assert await channel.unary_unary("/a/b")(bytes(size), timeout=60) == bytes(size)
            assert set(one.echo.peers) == {find_client(host)}

    run(test)


def test_tls_ends_at_the_relay_which_keeps_who_says_nothing_waiting_for_nobody(tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    certificate = b"".join(pem.bytes() for pem in own.cert_chain_pems).decode()
    security = Security(certificate=certificate, private_key=own.private_key_pem.bytes().decode())

    async def test() -> None:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with relayed(tmp_path, security, per_peer=40) as one:
            silent = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(20)]
            for _, writer in silent[:10]:
                writer.write(b"\x16\x03\x01\x02\x00")
            async with grpc.aio.secure_channel(f"127.0.0.1:{one.port}", credentials, UNLIMITED) as channel:
                for size in (4, 600_000, 20_000_000):
                    assert await channel.unary_unary("/a/b")(bytes(size), timeout=60) == bytes(size)
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(GREETING)  # no TLS
            assert await frames_of(reader, SETTINGS) != [SETTINGS]
            for _, opened in (*silent, (reader, writer)):
                opened.close()

    run(test)


@pytest.mark.parametrize("size", [1, 7, 24, 33, 40])
def test_a_call_in_pieces_and_a_late_acknowledgement_are_as_good_as_any(tmp_path: Path, size: int) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            sent = GREETING + call() + ACKNOWLEDGEMENT + call(3)
            for begin in range(0, len(sent), size):
                writer.write(sent[begin : begin + size])
                await writer.drain()
                await asyncio.sleep(0.001)
            for _ in range(2):
                assert DATA in await frames_of(reader, DATA)
            writer.close()

    run(test)


def test_heads_of_many_fields_take_no_memory_though_nobody_acknowledges_the_settings(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            own = psutil.Process()
            before = own.memory_info().rss
            # Whole heads in frames of their own, which only grpcio can hold to a size: three million fields.
            head = _head_block("/a/b", ()) + b"\x40\1a\1b"
            bombs = [_frame(HEADERS, 4, number, head + b"\xbe" * 16_000) for number in range(1, 21, 2)]
            opened = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(20)]
            for _, writer in opened:
                writer.write(GREETING + b"".join(bombs))
            for reader, _ in opened:
                kinds = await frames_of(reader, HEADERS)
                assert HEADERS in kinds or kinds[-1] in (GOAWAY, -1)
            assert own.memory_info().rss - before < 100 << 20
            assert not one.echo.peers
            for _, writer in opened:
                writer.close()

    run(test)


def test_a_head_without_end_closes_its_connection_and_takes_no_memory_of_the_relay(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            relay = psutil.Process(one.link.pid)
            opened = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(50)]
            for _, writer in opened[:25]:
                writer.write(_many_fields(480_000))
            begun = _frame(HEADERS, 0, 1, _literal("a", "b" * 100) * 100)
            for _, writer in opened[25:]:
                writer.write(GREETING + begun)
            for reader, _ in opened[:25]:
                assert (await frames_of(reader, -1))[-1] == -1
            assert relay.memory_info().rss < 60 << 20
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
                assert await channel.unary_unary("/a/b")(b"x", timeout=30) == b"x"
            for _, writer in opened:
                writer.close()

    run(test)


def test_who_says_nothing_that_is_http_2_is_closed_and_grpcio_never_hears_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            for text in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), PREFACE + _frame(PING, 0, 0, bytes(8)), PREFACE[:20]):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(text)
                if text == PREFACE[:20]:
                    writer.write_eof()
                assert await frames_of(reader, -1) == [-1]
                writer.close()

    run(test)


def test_of_an_address_with_too_many_connections_those_make_room_that_have_said_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path, per_peer=20) as one:
            opened = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(10)]
            for reader, writer in opened:
                writer.write(GREETING)
                assert await frames_of(reader, SETTINGS) == [SETTINGS]
            silent = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(25)]
            for reader, _ in silent[:15]:
                assert await frames_of(reader, -1) == [-1]
            await becomes(lambda: one.link.turned_away == 15)
            silent[-1][1].write(GREETING)
            for reader, writer in (opened[0], silent[-1]):
                writer.write(call())
                assert DATA in await frames_of(reader, DATA)
            for _, writer in (*opened, *silent):
                writer.close()

    run(test)


@pytest.mark.parametrize("sent", [b"", GREETING])
def test_who_holds_connections_and_asks_nothing_keeps_nobody_out_behind_the_same_address(
    tmp_path: Path, sent: bytes
) -> None:
    async def test() -> None:
        async with relayed(tmp_path, per_peer=20) as one:
            held = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(20)]
            for _, writer in held:
                writer.write(sent)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
                for _ in range(2):
                    assert await channel.unary_unary("/a/b")(b"x", wait_for_ready=True, timeout=60) == b"x"
            assert (await frames_of(held[0][0], -1))[-1] == -1
            await becomes(lambda: one.link.turned_away >= 1)
            for _, writer in held:
                writer.close()

    run(test)


def test_an_address_with_too_many_connections_loses_no_call_that_is_computed_and_gives_up_one_that_only_pings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "gpuprof.serving.protocol.relayed_connection"
    starting = (
        f"import {module} as m; m._IDLE_S = m._HALTED_S = -1.0; from gpuprof.serving.protocol.grpc_relay import main; "
    )
    command = [sys.executable, "-c", starting + "main()"]  # where whatever is not computed is idle at once
    monkeypatch.setattr("gpuprof.serving.protocol.grpc_relay_link.module_command", lambda name: command)

    async def test() -> None:
        async with relayed(tmp_path, per_peer=4) as one:
            held = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(4)]
            for reader, writer in held:
                writer.write(GREETING)
                assert await frames_of(reader, SETTINGS) == [SETTINGS]
            for _, writer in held[:3]:
                writer.write(call(path="/later/b"))
            await becomes(lambda: len(one.echo.peers) == 3)
            held[3][1].write(call())  # the last one of which something has come
            assert DATA in await frames_of(held[3][0], DATA)
            kinds: list[int] = []
            while DATA not in kinds:  # the relay looks at what has come ten times a second
                await asyncio.sleep(0.02)
                held[3][1].write(_frame(PING, 0, 0, bytes(8)))
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(GREETING + call())
                kinds = await frames_of(reader, DATA)
                writer.close()
            assert (await frames_of(held[3][0], -1))[-1] == -1
            one.echo.may_answer.set()
            for reader, _ in held[:3]:
                assert DATA in await frames_of(reader, DATA)
            for _, opened in held:
                opened.close()

    run(test)


@pytest.mark.parametrize("sent", [b"", GREETING, GREETING + call()[:-1]])
def test_two_addresses_that_hold_all_connections_keep_a_third_out_of_nothing(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprof.serving.protocol.grpc_relay_link._MAX_CONNECTIONS", 40)

    async def test() -> None:
        async with relayed(tmp_path) as one:
            held = [
                await asyncio.open_connection("127.0.0.1", one.port, local_addr=(host, 0))
                for host in ("127.0.0.2", "127.0.0.3")
                for _ in range(20)
            ]
            for _, writer in held:
                writer.write(sent)
            if sent:
                for reader, _ in held:
                    assert await frames_of(reader, SETTINGS) == [SETTINGS]
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(GREETING + call())
                assert DATA in await frames_of(reader, DATA)
                writer.close()
                await writer.wait_closed()
            for _, writer in held:
                writer.close()

    run(test)


def test_half_a_hello_of_tls_takes_no_memory(tmp_path: Path) -> None:
    async def test() -> None:
        authority = trustme.CA()
        own = authority.issue_cert("127.0.0.1")
        certificate = b"".join(pem.bytes() for pem in own.cert_chain_pems).decode()
        security = Security(certificate=certificate, private_key=own.private_key_pem.bytes().decode())
        async with relayed(tmp_path, security, per_peer=1000) as one:
            relay = psutil.Process(one.link.pid)
            await asyncio.sleep(0.5)
            before = relay.memory_info().rss
            held = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(400)]
            for _, writer in held:
                writer.write(b"\x16\x03\x01\x02\x00" + bytes(100))
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(f"127.0.0.1:{one.port}", credentials) as channel:
                assert await channel.unary_unary("/a/b")(b"x", wait_for_ready=True, timeout=60) == b"x"
            assert relay.memory_info().rss - before < 8 << 20
            for _, writer in held:
                writer.close()

    run(test)


def test_addresses_begin_their_handshakes_in_turn_newest_and_oldest_and_who_is_gone_takes_none() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay, begun = Relay(RelayOrder([], theirs.detach(), -1, 10, 10, 30.0)), list[str]()
    for name in ("a1", "a2", "a3", "a4", "a5", "a6", "b1", "c1", "b2"):
        pending = cast(Any, Hello(name, begun))
        relay._take_hello(pending)
        if name != "c1":
            relay._pending[pending] = None
    for count in (4, 8, 8):
        relay._begin_handshakes()
        assert len(begun) == count
    assert begun == ["a1", "b1", "a6", "b2", "a2", "a5", "a3", "a4"]
    assert not relay._hellos
    ours.close()
    relay._router.close()


def test_a_relay_that_is_killed_comes_back_and_keeps_its_port(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
            for _ in range(2):
                assert await channel.unary_unary("/a/b")(b"x", wait_for_ready=True, timeout=60) == b"x"
                killed = one.link.pid
                os.kill(killed, signal.SIGKILL)
                await becomes(lambda killed=killed: one.link.pid not in (0, killed))  # type: ignore[misc]
            assert await channel.unary_unary("/a/b")(b"x", wait_for_ready=True, timeout=60) == b"x"

    run(test)


def test_a_relay_that_is_stopped_loses_no_call_and_one_that_ends_leaves_no_file_open(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
            echo = channel.unary_unary("/a/b")
            assert await echo(b"x", wait_for_ready=True, timeout=60) == b"x"
            files = psutil.Process().num_fds()
            for number in range(3):
                stopped = one.link.pid
                os.kill(stopped, signal.SIGSTOP)
                waiting = asyncio.ensure_future(echo(b"y", timeout=60))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                os.kill(stopped, signal.SIGCONT)
                assert await waiting == b"y"
                os.kill(stopped, signal.SIGSTOP)
                os.kill(stopped, signal.SIGKILL)
                await becomes(lambda stopped=stopped: one.link.pid not in (0, stopped))  # type: ignore[misc]
                assert await echo(b"x", wait_for_ready=True, timeout=60) == b"x", number
            await becomes(lambda: psutil.Process().num_fds() <= files)

    run(test)


def test_a_relay_that_does_not_answer_is_replaced_and_never_for_a_pause_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited_s = [0.0]
    monkeypatch.setattr("gpuprof.serving.protocol.grpc_relay_link.read_waited_s", lambda pid: waited_s[0])
    monkeypatch.setattr("gpuprof.serving.watch.logs.LOGGER.propagate", True)

    async def test() -> None:
        async with relayed(tmp_path) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
            link, echo = one.link, channel.unary_unary("/a/b")
            stopped = link.pid
            os.kill(stopped, signal.SIGSTOP)
            for awake_s in (100.0, 159.0):  # it starts, which may take long
                link.watch(awake_s)
            os.kill(stopped, signal.SIGCONT)
            await becomes(lambda: link._has_answered and link._asked is None)
            os.kill(stopped, signal.SIGSTOP)
            # The clock stands still with the router and the machine; a wait for a core is no silence.
            for awake_s, waited in [(200.0, 0.0), (209.0, 0.0), (209.0, 0.0), (250.0, 40.5)]:
                waited_s[0] = waited
                link.watch(awake_s)
            assert link.pid == stopped and link.figures == RelayFigures(0, 0, 9.5)
            link.watch(250.6)
            await becomes(lambda: link.pid not in (0, stopped))
            assert link.figures == RelayFigures(0, 1, 0.0)
            assert "the relay of gRPC hangs, is replaced" in caplog.messages
            assert await echo(b"x", wait_for_ready=True, timeout=60) == b"x"
            link.watch(1000.0)
            await becomes(lambda: link._has_answered and link._asked is None)
            assert link.figures == RelayFigures(0, 1, 0.0)

    run(test)


def test_a_client_of_tls_that_offers_no_http_2_is_refused_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpuprof.serving.watch.logs.LOGGER.propagate", True)
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    certificate = b"".join(pem.bytes() for pem in own.cert_chain_pems).decode()
    security = Security(certificate=certificate, private_key=own.private_key_pem.bytes().decode())

    async def test() -> None:
        async with relayed(tmp_path, security) as one:
            for protocols in ([], ["http/1.1"], ["http/1.1", "h2"]):
                context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
                if protocols:
                    context.set_alpn_protocols(protocols)
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=context)
                writer.write(GREETING + call())
                assert (DATA in await frames_of(reader, DATA)) == ("h2" in protocols)
                writer.close()
            await becomes(lambda: any("offer no HTTP/2" in text for text in caplog.messages))

    run(test)


def test_a_client_that_does_not_read_is_given_up_and_what_it_is_sent_does_not_pile_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path, stall_s=1.0) as one:
            relay = psutil.Process(one.link.pid)
            _, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1)
            wide = _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1)) + _frame(8, 0, 0, b"\x7f\xff\0\0")
            writer.write(PREFACE + wide + ACKNOWLEDGEMENT)
            writer.write(b"".join(call(number, path="/large/b") for number in range(1, 61, 2)))
            await becomes(lambda: len(one.echo.peers) == 30)
            assert relay.memory_info().rss < 60 << 20
            connected = [file for file in relay.net_connections("tcp") if file.status == "ESTABLISHED"]
            assert connected
            await becomes(lambda: connected[0] not in relay.net_connections("tcp"))
            writer.close()

    run(test)


def test_what_grpcio_says_last_reaches_the_client_when_the_server_stops(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(GREETING + ACKNOWLEDGEMENT)
            assert await frames_of(reader, SETTINGS) == [SETTINGS]
            waits = asyncio.ensure_future(frames_of(reader, -1))
            await one.link.stop_listening()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", one.port), timeout=10.0)
            await one.server.stop(1.0)
            assert GOAWAY in await waits
            writer.close()

    run(test)


def test_a_secret_of_the_order_is_not_shown() -> None:
    assert "secret" not in repr(RelayOrder([1], 2, 3, 4, 5, 6.0, "secret", "secret"))


def test_two_thousand_calls_at_once_are_all_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with relayed(tmp_path) as one:
            channels = [
                grpc.aio.insecure_channel(f"127.0.0.1:{one.port}", [("grpc.use_local_subchannel_pool", 1)])
                for _ in range(4)
            ]
            calls = [channel.unary_unary("/a/b")(b"x", timeout=100) for channel in channels for _ in range(500)]
            assert await asyncio.gather(*calls) == [b"x"] * 2000
            for channel in channels:
                await channel.close()

    run(test)


def test_calls_go_on_beside_another_connection_of_the_address_that_sends_data_by_the_byte(tmp_path: Path) -> None:
    flood = _frame(HEADERS, 4, 1, _head_block("/a/b", ())) + _frame(DATA, 0, 1, b"x") * 20_000

    async def send_on(port: int) -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GREETING + flood)
                await writer.drain()
                writer.close()

    async def test() -> None:
        async with relayed(tmp_path) as one:
            flooding = [asyncio.ensure_future(send_on(one.port)) for _ in range(4)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}", UNLIMITED) as channel:
                for _ in range(30):
                    assert await channel.unary_unary("/a/b")(bytes(100_000), timeout=60) == bytes(100_000)
            for task in flooding:
                task.cancel()

    run(test)
