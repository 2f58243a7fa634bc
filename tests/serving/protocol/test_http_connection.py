"""One connection on a transport that a test holds in its hand: what it may cost, and for how long."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.serving.protocol.body_turns import MOST_BODIES, MOST_WAITING
from gpuprof.serving.protocol.connection_set import ConnectionSet
from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_connection import HttpConnection
from gpuprof.serving.protocol.http_message import MOST_KNOWN, HttpHead, is_own_host, read_head
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody, Route
from gpuprof.serving.protocol.incoming_request import MAX_REFUSED_BYTES
from gpuprof.serving.protocol.loop_turns import LoopTurns
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer
from tests.reruns import serves_in_real_time

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class HeldTransport(asyncio.Transport):
    """Sends nothing until it is told to."""

    def __init__(self, peer: str = "10.0.0.1", accepted: socket.socket | None = None) -> None:
        super().__init__()
        self._accepted = accepted
        self.written = b""
        self.sent = 0
        self.paused = self.closed = False
        self._peer = peer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self._peer, 1234), "socket": self._accepted}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return len(self.written) - self.sent

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(map(bytes, list_of_data))

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def send(self, connection: HttpConnection) -> None:
        self.sent = len(self.written)
        connection.resume_writing()


@pytest.fixture
def api() -> HttpApi:
    api = HttpApi(Router(Arena(1 << 22)), 1 << 26, connections_per_peer=3)
    api.turns = LoopTurns(lambda begin_turn: begin_turn())  # of no loop: each request has a turn of its own
    return api


def connect(api: HttpApi, peer: str = "10.0.0.1") -> tuple[HttpConnection, HeldTransport]:
    connection, transport = HttpConnection(api), HeldTransport(peer)
    connection.connection_made(transport)
    return connection, transport


def send_bytes(connection: HttpConnection, data: bytes) -> None:
    while data:
        buffer = connection.get_buffer(-1)
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


@pytest.mark.parametrize("beginning", [b"G", LIVE[:-2], LIVE + LIVE[:9]])
def test_a_head_that_never_ends_is_overdue_however_often_a_byte_comes(api: HttpApi, beginning: bytes) -> None:
    connection, transport = connect(api)
    now = time.monotonic()
    send_bytes(connection, beginning)
    transport.send(connection)
    assert not connection.is_overdue(now + 20.0, 30.0)
    send_bytes(connection, b"a")
    assert connection.progress.touched >= now and connection.is_overdue(now + 40.0, 30.0)


def test_requests_that_do_not_become_whole_keep_no_other_connection_of_their_client_out(api: HttpApi) -> None:
    held = [connect(api) for _ in range(3)]
    for connection, _ in held:
        send_bytes(connection, LIVE[:-2])
    assert b" 429 " in connect(api)[1].written  # they have only begun
    held[1][0].progress._began = time.monotonic() - 1.0
    send_bytes(held[1][0], b"X: y\r\n")  # a little more of it makes no difference
    new, transport = connect(api)
    send_bytes(new, LIVE)
    assert b" 200 " in transport.written
    assert [one.is_closing() for _, one in held] == [False, True, False]


def test_a_client_whose_request_is_whole_or_that_is_asked_nothing_is_not_unfinished(api: HttpApi) -> None:
    connection, transport = connect(api)
    later = time.monotonic() + 10.0
    assert not connection.is_unfinished_at(later)
    send_bytes(connection, LIVE[:9])
    assert connection.is_unfinished_at(later) and not connection.is_unfinished_at(time.monotonic())
    connection.busy = True
    assert not connection.is_unfinished_at(later)
    connection.busy = False
    send_bytes(connection, LIVE[9:])
    transport.send(connection)
    assert not connection.is_unfinished_at(later)


def test_a_connection_on_which_nothing_is_asked_is_not_overdue(api: HttpApi) -> None:
    connection, transport = connect(api)
    send_bytes(connection, LIVE)
    transport.send(connection)
    assert connection.is_idle and not connection.is_overdue(time.monotonic() + 1e6, 30.0)


def test_a_pause_after_an_answer_that_was_read_slowly_does_not_count_against_the_next_request(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    connection, transport = connect(api)
    send_bytes(connection, LIVE)  # of which nothing is sent yet
    now += 1.0
    transport.send(connection)
    now += 100.0
    send_bytes(connection, LIVE[:10])
    assert not connection.is_idle and not connection.is_overdue(now + 1.0, 30.0)
    assert connection.is_overdue(now + 31.0, 30.0)


@serves_in_real_time
def test_who_asks_again_and_again_and_reads_nothing_is_not_heard(api: HttpApi) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        for _ in range(10_000):
            if transport.paused:
                break
            send_bytes(connection, LIVE)
        assert transport.paused and len(transport.written) < 1 << 17
        answered = transport.written.count(b"200 OK")
        assert connection.is_overdue(time.monotonic() + 100.0, 30.0)
        transport.send(connection)
        assert transport.written.count(b"200 OK") > answered

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_line", "header", "closes"),
    [
        ("GET /v2/health/live HTTP/1.1", "Connection: close", True),
        ("GET /v2/health/live HTTP/1.1", "connection: x, Close", True),
        ("HEAD /v2/health/live HTTP/1.1", "Connection: close", True),
        ("POST /v2/health/live HTTP/1.1", "Connection: close\r\nContent-Length: 0", True),
        ("GET /v2/health/live HTTP/1.0", "X: y", True),
        ("GET /v2/health/live HTTP/1.1", "X: close", False),
    ],
)
def test_the_connection_is_closed_after_the_answer_where_the_client_wants_it(
    api: HttpApi, request_line: str, header: str, closes: bool
) -> None:
    async def ask() -> None:
        for _ in range(2):  # the second head is known
            connection, transport = connect(api)
            send_bytes(connection, f"{request_line}\r\nHost: x\r\n{header}\r\n\r\n".encode())
            assert connection._lingering == closes == (b"\r\nConnection: close\r\n" in transport.written)

    asyncio.run(ask())


def test_a_connection_on_which_nothing_is_asked_makes_room_for_another_of_its_address(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic() + 1.5
    half, idle, busy = (connect(api) for _ in range(3))
    send_bytes(half[0], LIVE[:-2])
    send_bytes(busy[0], LIVE)
    busy[0].busy = True
    monkeypatch.setattr(time, "monotonic", lambda: now)
    _, new = connect(api)
    assert [transport.is_closing() for _, transport in (half, idle, busy)] == [False, True, False] and not new.written
    now += 5.0
    connect(api)
    assert half[1].is_closing() and not busy[1].is_closing()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize(
    ("begins", "is_wide"),
    [
        (
            b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\nInference-Header-Content-Length: 0\r\n\r\n0",
            True,
        ),
        (b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n0", False),
        (LIVE * 20, False),
    ],
)
def test_only_whoever_may_send_a_large_body_has_the_system_take_a_megabyte_of_it_unread(
    api: HttpApi, begins: bytes, is_wide: bool
) -> None:
    api._routes[b"POST", b"/infer"] = Route(lambda *_: None, 1 << 24, reads_body=True)

    async def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # what it has taken, the other end has
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                connection, transport = HttpConnection(api), HeldTransport(accepted=accepted)
                connection.connection_made(transport)
                send_bytes(connection, begins)
                client.settimeout(0.5)
                taken = 0
                with suppress(TimeoutError):
                    while taken < 800_000:
                        taken += client.send(bytes(1 << 14))
                assert (taken >= 800_000) == is_wide
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
                connection.connection_lost(None)

    asyncio.run(ask())


def test_one_address_has_only_so_many_connections(api: HttpApi) -> None:
    kept = [connect(api) for _ in range(3)]
    _, turned_away = connect(api)
    assert turned_away.written.startswith(b"HTTP/1.1 429 ")
    _, other = connect(api, "10.0.0.2")
    assert not other.written
    kept[0][0].connection_lost(None)
    _, next_one = connect(api)
    assert not next_one.written and api.connections.turned_away == 1


@serves_in_real_time
def test_memory_is_taken_as_a_body_comes_and_not_as_it_is_announced() -> None:
    async def main() -> None:
        from gpuprof.rules.routing import routing_rule
        from gpuprof.serving.router.served_model import ServedModel

        arena = Arena(1 << 22)
        router = Router(arena)
        router.publish([ServedModel("m", 100.0, routing_rule("fastest"), arena)])
        api = HttpApi(router, 1 << 26)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
        connections = [connect(api)[0] for _ in range(20)]
        for connection in connections:
            send_bytes(connection, head + bytes(1000))
        assert arena.used <= 20 * (1 << 18)
        send_bytes(connections[0], bytes(1_500_000))
        assert arena.used >= 1_500_000
        for connection in connections:
            connection.connection_lost(None)
        assert arena.used == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"/v2", b"/v2", b"x"),
        (b"http://y:80/v2?a=http://z/", b"/v2?a=http://z/", b"y:80"),
        (b"HTTP://y", b"/", b"y"),
    ],
)
def test_a_target_in_absolute_form_says_host_and_path(target: bytes, path: bytes, host: bytes) -> None:
    head = read_head(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (head.target, head.headers[b"host"]) == (path, host)


@pytest.mark.parametrize(
    "host", [b"localhost:1@evil.example", b"[::1].evil.example", b":evil.example", b"x:80:90", b"x y", b"\xff"]
)
@pytest.mark.parametrize("request_line", [b"GET /v2 HTTP/1.1\r\nHost: ", b"GET http://"])
def test_a_host_that_readers_may_understand_in_two_ways_is_refused(request_line: bytes, host: bytes) -> None:
    rest = b"/v2 HTTP/1.1\r\nHost: x\r\n\r\n" if b"//" in request_line else b"\r\n\r\n"
    with pytest.raises(RefusedError) as refused:
        read_head(request_line + host + rest)
    assert refused.value.status == 400


def test_blanks_behind_the_value_of_a_header_are_no_part_of_it() -> None:
    head = read_head(b"POST / HTTP/1.1\r\nHost: x \t\r\nContent-Length: 5 \t\r\n\r\n")
    assert (head.length, head.headers[b"host"]) == (5, b"x")


@pytest.mark.parametrize(
    ("host", "own"),
    [
        (b"localhost:8000", True),
        (b"127.0.0.1:8000", True),
        (b"[::1]:8000", True),
        (b"gpu.example.org", True),
        (b"evil.example.org:8000", False),
        (b"evil.", True),
        (b"a.b.", False),
    ],
)
def test_a_page_cannot_ask_by_a_name_of_its_own(host: bytes, own: bool) -> None:
    assert is_own_host(host, {"gpu.example.org"}) == own


@pytest.fixture
def waiting(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Have every request wait for its turn here."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(api.turns, "wait", lambda lane, resume: waiting.append(resume))
    monkeypatch.setattr(api.turns, "admits_all", lambda now: False)
    monkeypatch.setattr(api.turns, "admits", lambda lane, now: False)
    return waiting


def test_a_request_that_is_denied_its_turn_waits_and_the_next_behind_it_for_one_of_its_own(
    api: HttpApi, waiting: list[Callable[[], None]]
) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, LIVE[:10])
        send_bytes(connection, LIVE[10:] + LIVE)
        assert not transport.written and len(waiting) == 1 and not connection.is_idle
        waiting.pop()()
        assert transport.written.count(b"HTTP/1.1 200") == 1 and len(waiting) == 1
        waiting.pop()()
        assert transport.written.count(b"HTTP/1.1 200") == 2 and not waiting
        transport.send(connection)
        assert connection.is_idle

    asyncio.run(main())


def test_a_client_that_ended_its_side_gets_all_its_answers_however_many_turns_they_take(
    api: HttpApi, waiting: list[Callable[[], None]]
) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, 3 * LIVE)
        assert connection.eof_received()
        while waiting:
            assert not connection._lingering
            waiting.pop()()
        assert transport.written.count(b"HTTP/1.1 200") == 3
        assert transport.written.count(b"Connection: close") == 1 and connection._lingering

    asyncio.run(main())


def test_chunks_wait_for_their_turn_apart_from_requests(
    api: HttpApi, waiting: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[object] = []

    def wait(lane: object, resume: Callable[[], None]) -> None:
        lanes.append(lane)
        waiting.append(resume)

    monkeypatch.setattr(api.turns, "wait", wait)

    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, LIVE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
        waiting.pop()()
        send_bytes(connection, b"1\r\na\r\n" * 3)
        assert len(waiting) == 1 and lanes == ["10.0.0.1", ("10.0.0.1", None)]
        waiting.pop()()
        send_bytes(connection, b"0\r\n\r\n")
        assert not transport.written
        waiting.pop()()
        assert transport.written.count(b"HTTP/1.1 200") == 1

    asyncio.run(main())


def test_a_long_row_of_chunks_takes_several_turns(api: HttpApi, waiting: list[Callable[[], None]]) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, LIVE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")
        turns = 0
        while waiting:
            turns += 1
            waiting.pop()()
        assert turns == 5 and transport.written.count(b"HTTP/1.1 200") == 1

    asyncio.run(main())


@pytest.mark.parametrize(("lines", "status"), [(200, b"200"), (300, b"431")])
def test_a_head_has_a_limited_number_of_headers_also_of_one_name(api: HttpApi, lines: int, status: bytes) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, LIVE[:-2] + b"a: b\r\n" * lines + b"\r\n")
        assert transport.written.startswith(b"HTTP/1.1 " + status)

    asyncio.run(main())


def test_what_is_not_read_yet_of_requests_that_wait_is_bounded(api: HttpApi, waiting: list[Callable[[], None]]) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        while not transport.paused:
            send_bytes(connection, 100 * LIVE)
        assert len(connection._pending) < 1 << 16 and len(waiting) == 1
        while waiting:
            waiting.pop()()
            transport.send(connection)
        assert not transport.paused and connection.is_idle

    asyncio.run(main())


@pytest.mark.parametrize(("asked", "answers"), [(LIVE, 1), (LIVE[:10], 0)])
def test_a_client_that_ends_its_side_while_its_request_waits_is_answered_and_the_connection_closed(
    api: HttpApi, waiting: list[Callable[[], None]], asked: bytes, answers: int
) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        send_bytes(connection, asked)
        assert connection.eof_received()
        waiting.pop()()
        assert transport.written.count(b"HTTP/1.1 200") == answers
        assert transport.written.count(b"Connection: close") == answers
        assert transport.is_closing() or connection._lingering  # which ends by itself

    asyncio.run(main())


def test_a_request_counts_from_when_it_was_to_be_read_but_not_from_when_its_client_began_to_send_it(
    api: HttpApi, waiting: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[float] = []

    def record_arrival(client: HttpClient, _: HttpHead, body: ReceivedBody) -> None:
        arrived.append(body.arrived)
        client.respond_json(200, {})

    monkeypatch.setattr(api, "find_route", lambda head: Route(record_arrival))
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    connection, _ = connect(api)
    for piece in (LIVE[:10], LIVE[10:]):
        send_bytes(connection, piece)
        now += 1.0
        waiting.pop()()
        now += 1.0
    assert arrived == [102.0]


def test_a_connection_that_is_lost_while_it_waits_for_its_turn_reads_nothing_then(
    api: HttpApi, waiting: list[Callable[[], None]]
) -> None:
    connection, transport = connect(api)
    send_bytes(connection, LIVE)
    connection.connection_lost(None)
    waiting.pop()()
    assert not transport.written


def test_a_request_waits_in_the_lane_of_its_model_where_its_address_was_asked_for_before_else_of_its_client(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Route(lambda client, *_: client.respond_json(200, {}), lane="m")
    monkeypatch.setattr(api, "_find_path", lambda head: route)
    lanes: list[Hashable] = []
    monkeypatch.setattr(api.turns, "admits_all", lambda now: False)
    monkeypatch.setattr(api.turns, "admits", lambda lane, now: lanes.append(lane) or True)  # type: ignore[func-returns-value]
    for _ in range(2):
        connection, transport = connect(api)
        send_bytes(connection, LIVE)
        transport.send(connection)
        send_bytes(connection, b"GET")
    assert lanes == ["10.0.0.1", "10.0.0.1", "m", "10.0.0.1"]


def test_heads_that_are_known_are_not_parsed_again_and_long_ones_are_not_kept() -> None:
    text = b"GET /v2 HTTP/1.1\r\nHost: known.example\r\n\r\n"
    assert read_head(text) is read_head(bytes(bytearray(text)))
    assert read_head(text).headers == {b"host": b"known.example"}
    long = b"GET /v2 HTTP/1.1\r\nHost: x\r\nFilling: " + bytes([0x61]) * 2000 + b"\r\n\r\n"
    assert read_head(long) == read_head(bytes(bytearray(long))) and read_head(long) is not read_head(long)


HEAD_OF_FOUR = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


@pytest.fixture
def echo(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> list[HttpHead]:
    """Have the server give back bodies; what is returned fills with the heads that were looked up."""
    found: list[HttpHead] = []

    def answer(client: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        client.respond(200, b"x", bytes(received.body.data))

    def find(head: HttpHead) -> Route:
        found.append(head)
        return Route(answer, reads_body=True)

    monkeypatch.setattr(api, "_find_path", find)
    return found


def ask_in_pieces(api: HttpApi, stream: bytes, size: int) -> bytes:
    """Return what is written when a stream comes in pieces of so many bytes."""

    async def ask() -> bytes:
        connection, transport = connect(api)
        for begin in range(0, len(stream), size):
            send_bytes(connection, stream[begin : begin + size])
            for _ in range(size + 4):  # as many turns as requests can have ended in the piece
                transport.send(connection)
                await asyncio.sleep(0)
                if connection.is_idle:
                    break
        return transport.written

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [1, 7, 61, 1000])
def test_requests_whose_head_came_before_get_their_own_bodies_however_they_are_split(
    api: HttpApi, echo: list[HttpHead], size: int
) -> None:
    bodies = [b"%04d" % number for number in range(20)]
    written = ask_in_pieces(api, b"".join(HEAD_OF_FOUR + body for body in bodies), size)
    answers = [part.partition(b"\r\n\r\n")[2] for part in written.split(b"HTTP/1.1 200 OK")[1:]]
    assert answers == bodies
    assert list(api.known_heads) == [HEAD_OF_FOUR] and len(echo) == 1
    api.forget_routes()
    ask_in_pieces(api, HEAD_OF_FOUR + b"0000", 1000)
    assert len(echo) == 2  # the models have changed: found anew


def test_a_head_that_came_before_is_not_parsed_or_looked_up_again(
    api: HttpApi, echo: list[HttpHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_in_pieces(api, HEAD_OF_FOUR + b"0000", 1000)
    monkeypatch.setattr(api, "find_route", lambda head: pytest.fail("it is looked up again"))
    assert ask_in_pieces(api, HEAD_OF_FOUR + b"1111", 1000).endswith(b"\r\n\r\n1111")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nX: " + bytes(1024).replace(b"\0", b"x") + b"\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nContent-Length: 4\r\n\r\n",
    ],
)
def test_heads_of_requests_that_are_refused_or_need_more_than_a_small_body_are_not_remembered(
    api: HttpApi, echo: list[HttpHead], head: bytes
) -> None:
    ask_in_pieces(api, head + b"0000", 2000)
    assert not api.known_heads


def test_no_head_without_the_token_is_remembered(echo: list[HttpHead], api: HttpApi) -> None:
    api._admits = lambda authorization: authorization == b"Bearer right"
    for token in (b"wrong", b"right", b"wrong"):
        head = HEAD_OF_FOUR[:-2] + b"Authorization: Bearer " + token + b"\r\n\r\n"
        written = ask_in_pieces(api, head + b"0000", 1000)
        assert written.startswith(b"HTTP/1.1 200" if token == b"right" else b"HTTP/1.1 401")
    assert len(api.known_heads) == 1


def test_so_many_heads_are_remembered_and_no_more(api: HttpApi, echo: list[HttpHead]) -> None:
    for number in range(MOST_KNOWN + 10):
        ask_in_pieces(api, HEAD_OF_FOUR[:-2] + b"X: %d\r\n\r\n0000" % number, 1000)
    assert 0 < len(api.known_heads) <= MOST_KNOWN


@pytest.mark.parametrize("beginning", [b"\r\n\r\n", b"\r\n\r\n\r\n\r\n"])
def test_a_head_without_a_request_line_is_no_request(beginning: bytes) -> None:
    with pytest.raises(RefusedError, match="request line") as refused:
        read_head(beginning)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Authorization", ["Bearer wrong", "Bearer right"]),
        ("Transfer-Encoding", ["identity", "chunked"]),
        ("Inference-Header-Content-Length", ["3", "5"]),
        ("Content-Encoding", ["gzip", "identity"]),
        ("Host", ["x", "y"]),
    ],
)
def test_what_a_proxy_may_read_in_another_way_is_given_once(name: str, values: list[str]) -> None:
    lines = ["POST / HTTP/1.1", "Host: x", *(f"{name}: {value}" for value in values), "", ""]
    with pytest.raises(RefusedError, match=f"one header {name}") as refused:
        read_head("\r\n".join(lines).encode())
    assert refused.value.status == 400
    accepted = ["POST / HTTP/1.1", "Host: x", "X: a", "X: b", "", ""]
    assert read_head("\r\n".join(accepted).encode()).headers[b"x"] == b"b"


def test_addresses_that_are_made_up_do_not_take_the_lane_of_a_model(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        api, "_find_path", lambda head: Route(lambda *_: None, lane="m" if b"infer" in head.target else None)
    )
    for number in range(5000):
        api.find_route(HttpHead(b"GET", b"/v2/health/live?%d" % number))
    api.find_route(HttpHead(b"POST", b"/v2/models/m/infer"))
    assert api.find_lane(b"POST /v2/models/m/infer HTTP/1.1\r\n") == "m"
    assert len(api._routes) <= 1024


def test_no_more_of_a_large_request_is_read_while_it_waits_for_its_turn(
    api: HttpApi, waiting: list[Callable[[], None]], echo: list[HttpHead]
) -> None:
    connection, transport = connect(api)
    send_bytes(connection, b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n" + bytes(40_000))
    assert transport.paused and not transport.written
    waiting.pop()()
    assert not transport.paused
    send_bytes(connection, bytes(10_000))
    assert transport.written.endswith(bytes(50_000))


def test_a_large_body_that_is_refused_is_received_for_nothing_and_what_follows_is_answered(api: HttpApi) -> None:
    def refuse(text: Buffer, peer: str, waited_ms: float) -> None:
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "later")

    route = Route(lambda *_: pytest.fail("it is handled"), max_body=1 << 24, reads_body=True, refuse_early=refuse)
    api._routes[b"POST", b"/infer"] = route
    length = 3 * len(api.discard_buffer) + 1

    async def ask() -> bytes:
        connection, transport = connect(api)
        head = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % length
        send_bytes(connection, head + b"Inference-Header-Content-Length: 0\r\n\r\n" + bytes(70_000))
        assert len(connection.get_buffer(-1)) == len(api.discard_buffer) and transport.paused
        await asyncio.sleep(0)
        assert not transport.paused
        send_bytes(connection, bytes(length - 70_000) + LIVE)
        transport.send(connection)
        await asyncio.sleep(0)
        transport.send(connection)
        return transport.written

    written = asyncio.run(ask())
    assert re.findall(rb"HTTP/1.1 (\d+)", written) == [b"503", b"200"]
    assert not api.arena.used


def test_of_many_large_bodies_a_few_are_received_and_the_others_in_their_turn_or_refused_when_it_is_too_late(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_late(text: Buffer, peer: str, waited_ms: float) -> None:
        if waited_ms > 100.0:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "later")

    def answer(client: HttpClient, head: HttpHead, body: ReceivedBody) -> None:
        assert body.slot is not None
        api.arena.give_back(body.slot)
        client.respond(200, b"text/plain", b"")

    api._routes[b"POST", b"/infer"] = Route(answer, 1 << 24, reads_body=True, refuse_early=refuse_late)
    api.connections = ConnectionSet(100, 1000)
    head = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\nInference-Header-Content-Length: 0\r\n\r\n"

    async def ask() -> None:
        clients = [connect(api) for _ in range(MOST_BODIES + 3)]
        for connection, _ in clients:
            send_bytes(connection, head + bytes(40_000))
        assert [transport.paused for _, transport in clients] == [False] * MOST_BODIES + [True] * 3

        send_bytes(clients[0][0], bytes(60_000))
        assert b" 200 " in clients[0][1].written
        assert [transport.paused for _, transport in clients[MOST_BODIES:]] == [False, True, True]
        send_bytes(clients[MOST_BODIES][0], bytes(60_000))
        assert b" 200 " in clients[MOST_BODIES][1].written
        assert not clients[-2][1].paused and clients[-1][1].paused

        clients[-2][0].connection_lost(None)  # its turn goes to the last, which has waited for too long
        assert not clients[-1][1].paused
        late, transport = connect(api)
        send_bytes(late, head + bytes(40_000))
        assert transport.paused
        now = time.monotonic()
        monkeypatch.setattr("gpuprof.serving.protocol.body_turns.time.monotonic", lambda: now + 0.2)
        send_bytes(clients[1][0], bytes(60_000))
        await asyncio.sleep(0)
        assert not transport.paused  # to receive the rest for nothing
        send_bytes(late, bytes(60_000))
        assert b" 503 " in transport.written and b" 200 " in clients[1][1].written
        for connection, _ in clients[2:]:
            connection.connection_lost(None)

    asyncio.run(ask())
    assert not api.arena.used


def test_no_request_is_read_of_a_model_with_enough_bodies_that_wait_and_its_wait_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = HttpApi(Router(Arena(1 << 22)), 1 << 26, connections_per_peer=100)
    waited = list[float]()
    refuse_early = lambda text, peer, waited_ms: waited.append(waited_ms)  # noqa: E731
    route = Route(lambda *_: None, 1 << 24, reads_body=True, refuse_early=refuse_early, lane="m")
    api._routes[b"POST", b"/infer"] = route
    head = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\nInference-Header-Content-Length: 0\r\n\r\n"

    async def ask() -> None:
        monkeypatch.setattr("gpuprof.serving.protocol.loop_turns.TURN_S", 10.0)
        clients = [connect(api) for _ in range(MOST_BODIES + MOST_WAITING + 1)]
        used = 0
        for connection, _ in clients:
            used = api.arena.used
            send_bytes(connection, head + bytes(10_000))
        assert clients[-1][0].incoming is None and clients[-1][0]._awaits_turn and api.arena.used == used
        assert waited == [0.0] * (MOST_BODIES + MOST_WAITING)
        await asyncio.sleep(0.02)  # the others send nothing, so that there is room soon
        incoming = clients[-1][0].incoming
        assert incoming is not None and incoming.waited_ms > 0.0 and incoming.waited_ms in waited
        for connection, _ in clients:
            connection.connection_lost(None)

    asyncio.run(ask())
    assert not api.arena.used


async def wait_for_body_turn(
    api: HttpApi, length: int, refuse_early: Any = None
) -> tuple[HttpConnection, HeldTransport]:
    """Return a connection whose body waits while `MOST_BODIES` others are received."""
    api._routes[b"POST", b"/infer"] = Route(lambda *_: None, 1 << 30, reads_body=True, refuse_early=refuse_early)
    api.connections = ConnectionSet(100, 1000)
    head = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nInference-Header-Content-Length: 0\r\n\r\n"
    for _ in range(MOST_BODIES):
        send_bytes(connect(api)[0], head % 100_000 + bytes(40_000))
    waiting, transport = connect(api)
    send_bytes(waiting, head % length + bytes(40_000))
    assert transport.paused
    return waiting, transport


def test_a_client_whose_body_the_router_does_not_read_is_not_overdue_and_has_its_time_afterwards(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        connection, transport = await wait_for_body_turn(api, 100_000)
        now = time.monotonic() + 100.0
        assert not connection.is_overdue(now, 30.0)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        for _ in range(3):
            await asyncio.sleep(0)  # the others send nothing, so that it has its turn
        assert not transport.paused
        assert not connection.is_overdue(now + 29.0, 30.0) and connection.is_overdue(now + 32.0, 30.0)
        send_bytes(connection, b"x")
        assert connection.is_overdue(now + 32.0, 30.0)

    asyncio.run(ask())


def test_a_body_that_would_take_long_to_receive_is_refused_at_once_when_it_has_waited_for_too_long(
    api: HttpApi,
) -> None:
    def refuse_late(text: Buffer, peer: str, waited_ms: float) -> None:
        if waited_ms:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "later")

    async def ask() -> None:
        connection, transport = await wait_for_body_turn(api, MAX_REFUSED_BYTES + 1, refuse_late)
        used = api.arena.used
        await asyncio.sleep(0)
        assert b" 503 " in transport.written and b"Connection: close" in transport.written
        assert connection._lingering and not transport.paused and api.arena.used < used

    asyncio.run(ask())


@pytest.mark.parametrize(("tracer", "lifo_after_s"), [(None, 2.0), (object(), math.inf)])
def test_later_bodies_go_first_when_half_the_slo_has_passed_and_never_where_none_is_refused_early(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch, tracer: object, lifo_after_s: float
) -> None:
    model = SimpleNamespace(name="m", slo_ms=4000.0, tracer=tracer)
    monkeypatch.setattr(api.router, "find", lambda name, version: model)
    assert api.find_route(HttpHead(b"POST", b"/v2/models/m/infer")).lifo_after_s == lifo_after_s


def test_who_has_no_token_takes_no_turns_from_those_who_have(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_admits", lambda authorization: authorization == b"Bearer right")
    monkeypatch.setattr(api, "_find_path", lambda head: Route(lambda *_: None, lane="m"))
    api.find_route(HttpHead(b"POST", b"/v2/models/m/infer", {b"authorization": b"Bearer right"}))
    lines = {
        b"Authorization: Bearer right\r\n\r\n": "m",
        b"X: y\r\nauthorization:  Bearer right \r\nX: y": "m",
        b"Authorization: Bearer wrong\r\n\r\n": None,
        b"X-Authorization: Bearer right\r\n\r\n": None,
        b"\r\n": None,
    }
    for line, lane in lines.items():
        assert api.find_lane(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n" + line) == lane


def test_hundreds_of_addresses_of_one_network_of_ipv6_are_one_client(api: HttpApi) -> None:
    connections = [connect(api, f"2001:db8::{number:x}") for number in range(1, 6)]
    assert [transport.written[9:12] for _, transport in connections] == [b"", b"", b"", b"429", b"429"]
    assert {connection.peer for connection, _ in connections} == {"2001:db8::"}
    for address in ("2001:db8:0:1::1", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "fe80::2%eth0"):
        assert not connect(api, address)[1].written
    connections[0][0].connection_lost(None)
    assert not connect(api, "2001:db8::9")[1].written


def test_a_client_of_http_1_0_is_not_told_to_go_on_which_it_would_take_for_the_answer(
    api: HttpApi, echo: list[HttpHead]
) -> None:
    rest = b"Host: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n0000"
    assert ask_in_pieces(api, b"POST /infer HTTP/1.0\r\n" + rest, 1000).startswith(b"HTTP/1.1 200")
    assert ask_in_pieces(api, b"POST /infer HTTP/1.1\r\n" + rest, 1000).startswith(b"HTTP/1.1 100")


def test_a_client_that_sends_ahead_while_its_answer_is_due_is_not_heard_beyond_a_little(api: HttpApi) -> None:
    api._routes[b"POST", b"/infer"] = Route(lambda *_: None, reads_body=True)  # never answered
    connection, transport = connect(api)
    send_bytes(connection, HEAD_OF_FOUR + b"0000")
    sent = 0
    while not transport.paused:
        send_bytes(connection, LIVE)
        sent += len(LIVE)
    assert sent <= 1 << 16


def test_a_body_that_nobody_reads_is_received_in_turn_with_those_of_others(api: HttpApi) -> None:
    async def ask() -> bytes:
        connection, transport = connect(api)
        send_bytes(connection, LIVE[:-2] + b"Content-Length: 900000\r\n\r\n" + bytes(50_000))
        assert transport.paused and len(connection.get_buffer(-1)) == 850_000
        await asyncio.sleep(0)
        assert not transport.paused
        send_bytes(connection, bytes(850_000) + LIVE)
        return transport.written

    assert asyncio.run(ask()).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
def test_a_version_that_is_not_spoken_is_refused(version: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_head(b"GET /v2 HTTP/" + version + b"\r\nHost: x\r\n\r\n")
    assert refused.value.status == 505
