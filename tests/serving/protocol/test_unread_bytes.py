"""Bodies that are discarded: what the system has received of them is removed there, and nothing of what follows."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.protocol.loop_turns import DiscardTurns, LoopTurns
from gpuprof.serving.protocol.unread_bytes import drop_unread, find_descriptor
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from tests.serving.protocol.test_http_connection import LIVE, HeldTransport, send_bytes

BODY_BYTES = 40_000
HEAD = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection of TCP: the client's end and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        server = listening.accept()[0]
        with server:
            yield client, server


def arrive(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    """Send it, and return when it can be read."""
    client, server = ends
    had = unread(server)
    client.sendall(data)
    while unread(server) < had + len(data):
        pass


def unread(server: socket.socket) -> int:
    try:
        return len(server.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


def test_what_has_come_is_dropped_and_what_follows_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    arrive(ends, bytes(BODY_BYTES) + b"next")
    room = memoryview(bytearray(BODY_BYTES))
    assert drop_unread(ends[1].fileno(), room) == BODY_BYTES
    assert ends[1].recv(100) == b"next"


def test_where_nothing_has_come_or_the_client_has_gone_nothing_is_dropped(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    room = memoryview(bytearray(10))
    assert drop_unread(ends[1].fileno(), room) == 0
    ends[0].close()
    ends[1].recv(1)  # returns once the end is there
    assert drop_unread(ends[1].fileno(), room) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems copy what is dropped")
def test_what_is_dropped_is_not_copied(ends: tuple[socket.socket, socket.socket]) -> None:
    arrive(ends, b"\xff" * 1000)
    room = bytearray(1000)
    assert drop_unread(ends[1].fileno(), memoryview(room)) == 1000 and not any(room)


class SocketTransport(HeldTransport):
    """Has a socket of the system, of which it reads only what the test feeds."""

    def __init__(self, own: socket.socket, context: object = None) -> None:
        super().__init__()
        self._info = {"socket": own, "sslcontext": context}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._info[name] if name in self._info else super().get_extra_info(name, default)


@pytest.fixture
def later() -> list[Callable[[], None]]:
    """What was to be called in the next turn of the loop."""
    return []


def connect(transport: HeldTransport, later: list[Callable[[], None]]) -> HttpConnection:
    api = HttpApi(Router(Arena(1 << 22)), 1 << 26)
    api.turns = LoopTurns(lambda begin_turn: begin_turn())
    api.discards = DiscardTurns(later.append)
    connection = HttpConnection(api)
    connection.connection_made(transport)
    return connection


def test_a_refused_body_that_has_come_is_answered_without_being_read_and_the_next_request_is_left(
    ends: tuple[socket.socket, socket.socket], later: list[Callable[[], None]]
) -> None:
    transport = SocketTransport(ends[1])
    connection = connect(transport, later)
    send_bytes(connection, HEAD + bytes(1000))
    assert transport.paused and not transport.written
    arrive(ends, bytes(BODY_BYTES - 1000) + LIVE)
    later.pop()()
    assert transport.written.startswith(b"HTTP/1.1 404") and not transport.paused and not later
    assert ends[1].recv(1 << 16) == LIVE
    send_bytes(connection, LIVE)
    assert b"HTTP/1.1 200" in transport.written


def test_of_a_refused_body_that_is_still_to_come_little_is_read_to_hear_of_it(
    ends: tuple[socket.socket, socket.socket], later: list[Callable[[], None]]
) -> None:
    transport = SocketTransport(ends[1])
    connection = connect(transport, later)
    send_bytes(connection, HEAD + bytes(1000))
    arrive(ends, bytes(20_000))
    later.pop()()
    assert unread(ends[1]) == 0 and not transport.written and not transport.paused
    heard = len(connection.get_buffer(-1))
    assert heard <= 4096
    send_bytes(connection, bytes(heard))
    assert transport.paused
    arrive(ends, bytes(BODY_BYTES - 21_000 - heard))
    later.pop()()
    assert transport.written.startswith(b"HTTP/1.1 404")


def test_of_an_encrypted_connection_nothing_is_dropped_unread(
    ends: tuple[socket.socket, socket.socket], later: list[Callable[[], None]]
) -> None:
    transport = SocketTransport(ends[1], context=object())
    assert find_descriptor(transport) is None
    connection = connect(transport, later)
    send_bytes(connection, HEAD + bytes(1000))
    arrive(ends, bytes(BODY_BYTES - 1000))
    later.pop()()
    assert unread(ends[1]) == BODY_BYTES - 1000 and not transport.paused
    send_bytes(connection, bytes(BODY_BYTES - 1000))
    assert transport.written.startswith(b"HTTP/1.1 404")


def test_a_connection_that_ended_while_its_body_waited_is_left_alone(
    ends: tuple[socket.socket, socket.socket], later: list[Callable[[], None]]
) -> None:
    transport = SocketTransport(ends[1])
    connection = connect(transport, later)
    send_bytes(connection, HEAD + bytes(1000))
    arrive(ends, bytes(100))
    connection.abort()  # its descriptor may be another connection's now
    later.pop()()
    assert unread(ends[1]) == 100
