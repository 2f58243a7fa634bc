"""Short records of TLS: they take a bounded part of the router's time, and of the relay's, whoever sends how many."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable
from functools import partial

import pytest
import trustme

from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.protocol.record_turns import FIRST_BYTES, TURN_S, RecordReader, RecordTurns
from gpuprof.serving.protocol.relayed_connection import PIECE_BYTES, receive_piece
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena

SPACE = memoryview(bytearray(1 << 20))


class Clock:
    """Stands still but when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read(reader: RecordReader, clock: Clock, byte_s: float) -> tuple[int, bool]:
    """Fill what may be read, at so many seconds a byte; return how much that was, and whether the reader must wait."""
    size = len(reader.limit(SPACE))
    clock.now += size * byte_s
    return size, reader.count(size)


def test_a_connection_with_short_records_has_a_part_of_a_millisecond_and_then_waits_for_its_turn() -> None:
    async def run() -> None:
        clock, resumed = Clock(), asyncio.Event()
        reader = RecordReader(RecordTurns(clock), "a", resumed.set)
        assert read(reader, clock, byte_s=2e-6) == (FIRST_BYTES, True)
        assert reader.is_waiting
        await resumed.wait()
        assert not reader.is_waiting
        size, must_wait = read(reader, clock, byte_s=2e-6)
        assert must_wait
        assert size * 2e-6 <= TURN_S / 10.0
        await asyncio.sleep(0)

    asyncio.run(run())


def test_long_records_never_wait_and_are_soon_read_without_a_limit() -> None:
    async def run() -> None:
        clock = Clock()
        reader = RecordReader(RecordTurns(clock), "a", pytest.fail)
        sizes = []
        for _ in range(5):
            sizes.append(read(reader, clock, byte_s=5e-10)[0])
            assert not reader.is_waiting
            await asyncio.sleep(0)
        assert sizes[0] == FIRST_BYTES
        assert sizes[-1] == len(SPACE)

    asyncio.run(run())


def test_whoever_comes_when_the_turn_is_over_has_one_record_and_goes_on_in_the_next_turn() -> None:
    async def run() -> None:
        clock, resumed = Clock(), list[int]()
        turns = RecordTurns(clock)
        busy = RecordReader(turns, "a", lambda: None)
        late = [RecordReader(turns, "a", partial(resumed.append, number)) for number in range(3)]
        read(busy, clock, byte_s=1e-5)
        assert turns.is_over("a")
        assert [read(reader, clock, byte_s=5e-10) for reader in late] == [(1, True)] * 3
        assert not resumed
        await asyncio.sleep(0)
        assert resumed == [0, 1, 2]
        assert not turns.is_over("a")
        assert read(late[0], clock, byte_s=5e-10) == (FIRST_BYTES, False)

    asyncio.run(run())


def test_the_turn_of_one_client_is_not_over_because_another_has_had_its_own() -> None:
    async def run() -> None:
        clock, own = Clock(), list[int]()
        turns = RecordTurns(clock)
        read(RecordReader(turns, "a", lambda: None), clock, byte_s=4e-6)
        assert turns.is_over("a")
        honest = RecordReader(turns, "b", partial(own.append, 0))
        assert read(honest, clock, byte_s=5e-10) == (FIRST_BYTES, False)
        read(RecordReader(turns, "c", lambda: None), clock, byte_s=4e-6)
        assert turns.is_over("b")  # for all together it is enough
        await asyncio.sleep(0)
        assert not any(turns.is_over(client) for client in "abc")

    asyncio.run(run())


def test_clients_have_their_turns_in_rotation_however_many_connections_one_has() -> None:
    async def run() -> None:
        turns, resumed = RecordTurns(Clock()), list[str]()
        done = asyncio.Event()
        for client in (*"aaaa", "b", "c", "b"):
            turns.wait(client, partial(resumed.append, client), is_slow=True)
        turns.wait("a", done.set, is_slow=True)
        await done.wait()
        assert "".join(resumed) == "abcabaa"

    asyncio.run(run())


class CountedTurns(RecordTurns):
    """Every read counts as slow: the clock goes on by 10 ms each time it is looked at."""

    def __init__(self) -> None:
        super().__init__(itertools.count(0.0, 0.01).__next__)
        self.waits = 0

    def wait(self, client: str, resume: Callable[[], None], is_slow: bool) -> None:
        self.waits += 1
        super().wait(client, resume, is_slow)


def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_a_body_in_records_of_a_byte_is_received_whole_in_many_turns() -> None:
    async def run() -> None:
        authority, arena = trustme.CA(), Arena(1 << 22)
        api = HttpApi(Router(arena), 1 << 20)
        api.records = turns = CountedTurns()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: HttpConnection(api), "127.0.0.1", 0, ssl=server_context(authority))
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(authority))
        text = b"POST /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n" + b"x" * 300
        text += b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        for byte in text:
            writer.write(bytes([byte]))
        answers = await reader.read()
        assert [answers.count(status) for status in (b"405 Method", b"200 OK")] == [1, 1]
        assert turns.waits > 5
        writer.close()
        server.close()
        api.pool.close()
        arena.close()

    asyncio.run(run())


def test_the_relay_takes_a_bounded_number_of_records_at_a_time() -> None:
    authority = trustme.CA()
    ends = socket.socketpair()
    try:
        server = server_context(authority).wrap_socket(ends[0], server_side=True, do_handshake_on_connect=False)
        client = client_context(authority).wrap_socket(
            ends[1], server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        for end in (server, client):
            end.setblocking(False)
        waiting = [client, server]
        while waiting:
            try:
                waiting[0].do_handshake()
                waiting.pop(0)
            except ssl.SSLWantReadError:
                waiting.reverse()
        for _ in range(200):
            client.send(b"x")
        room, sizes = memoryview(bytearray(PIECE_BYTES)), list[int]()
        while sum(sizes) < 200:
            size = receive_piece(server, room)
            assert size
            sizes.append(size)
        assert max(sizes) <= 16
        assert receive_piece(server, room) is None
    finally:
        for end in (server, client):
            end.close()
