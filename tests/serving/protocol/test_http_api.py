"""One HTTP connection on a transport that a test controls: framing, limits, memory, and the edge's headers."""

import asyncio
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import pytest

from gpuprof.serving.protocol.http_api import HttpApi, HttpConnection
from gpuprof.serving.protocol.http_message import HttpClient, HttpHead, Route, is_own_host
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.security import Security

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
STALL_S, IDLE_S = 30.0, 300.0


class HeldTransport(asyncio.Transport):
    """Sends nothing until it is told to."""

    def __init__(self, peer: str = "10.0.0.1") -> None:
        super().__init__()
        self.written = b""
        self.sent = 0
        self.paused = self.closed = False
        self._peer = peer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self._peer, 1234)}.get(name, default)

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
    return HttpApi(Router(Arena(1 << 22)), ServerSettings(max_connections=3))


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
def test_a_head_that_never_ends_is_closed_however_often_a_byte_comes(api: HttpApi, beginning: bytes) -> None:
    connection, transport = connect(api)
    now = time.monotonic()
    send_bytes(connection, beginning)
    transport.send(connection)
    send_bytes(connection, b"a")
    connection.watch(now + 20.0, STALL_S, IDLE_S)
    assert not transport.closed
    connection.watch(now + 40.0, STALL_S, IDLE_S)
    assert transport.closed


@pytest.mark.parametrize(("length", "closed"), [(1, True), (50 << 20, False)])
def test_a_body_has_time_for_its_size(api: HttpApi, length: int, closed: bool) -> None:
    async def main() -> None:
        serve_model(api)
        connection, transport = connect(api)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length
        send_bytes(connection, head)
        connection.watch(time.monotonic() + 40.0, STALL_S, IDLE_S)
        assert transport.closed == closed

    asyncio.run(main())


def test_an_idle_connection_is_closed_later_than_an_unread_answer(api: HttpApi) -> None:
    connection, transport = connect(api)
    send_bytes(connection, LIVE)
    unread, full = connect(api)
    send_bytes(unread, LIVE)
    transport.send(connection)
    for one in (connection, unread):
        one.watch(time.monotonic() + 40.0, STALL_S, IDLE_S)
    assert full.closed and not transport.closed
    connection.watch(time.monotonic() + 301.0, STALL_S, IDLE_S)
    assert transport.closed


def test_a_connection_beyond_the_bound_is_refused(api: HttpApi) -> None:
    held = [connect(api) for _ in range(3)]
    _, transport = connect(api)
    assert b" 503 " in transport.written and transport.closed and api.turned_away == 1
    held[0][0].connection_lost(None)
    api.connections = {connection for connection, _ in held[1:]}
    new, transport = connect(api)
    send_bytes(new, LIVE)
    assert b" 200 " in transport.written


def test_pipelined_requests_wait_while_answers_are_not_read(api: HttpApi) -> None:
    async def main() -> None:
        connection, transport = connect(api)
        for _ in range(4000):
            if transport.paused:
                break
            send_bytes(connection, LIVE)
        assert transport.paused and len(transport.written) < 1 << 18
        for _ in range(10):
            transport.send(connection)
        assert not transport.paused and connection.is_idle

    asyncio.run(main())


@pytest.mark.parametrize(
    "line", [b"HTTP/1.0\r\nHost: x", b"HTTP/1.1\r\nHost: x\r\nConnection: close"], ids=["1.0", "close"]
)
def test_the_connection_is_closed_after_the_answer_where_the_client_wants_it(api: HttpApi, line: bytes) -> None:
    connection, transport = connect(api)
    send_bytes(connection, b"GET /v2/health/live " + line + b"\r\n\r\n")
    assert b"Connection: close" in transport.written and transport.closed


def serve_model(api: HttpApi) -> ServedModel:
    model = ServedModel("m", 100.0, api.arena)
    api.router.publish([model])
    return model


def test_a_body_without_memory_is_discarded_and_the_next_request_answered() -> None:
    async def main() -> None:
        api = HttpApi(Router(Arena(1 << 21)), ServerSettings())
        serve_model(api)
        connection, transport = connect(api)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        send_bytes(connection, head + bytes(4_000_000) + LIVE)
        transport.send(connection)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first, second = transport.written.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"503") and second.startswith(b"200") and api.arena.used == 0

    asyncio.run(main())


def test_a_late_request_is_refused_before_its_tensors_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        api = HttpApi(Router(Arena(1 << 22)), ServerSettings())
        model = serve_model(api)

        def refuse(urgency: object, client: str) -> None:
            assert client == "10.0.0.1"
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "late", 1.0, overloaded=True)

        monkeypatch.setattr(model, "refuse_early", refuse)
        connection, transport = connect(api)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100002\r\n"
        send_bytes(connection, head + b"Inference-Header-Content-Length: 2\r\n\r\n{}" + bytes(9))
        assert api.arena.used == 0 and not transport.written
        send_bytes(connection, bytes(100_000 - 9))
        assert transport.written.startswith(b"HTTP/1.1 503") and not transport.closed

    asyncio.run(main())


def test_the_edge_says_who_the_client_is_and_when_its_request_began(api: HttpApi, echo: list[HttpHead]) -> None:
    peers: list[tuple[str, float]] = []

    def answer(client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        peers.append((client.peer, time.monotonic() - body.arrived))
        client.respond(200, b"x", b"")

    api._find_path = lambda head: Route(answer, reads_body=True)  # type: ignore[method-assign]
    for number in range(3):
        arrived = time.time() - 5.0 - number
        head = HEAD_OF_FOUR[:-2] + b"x-gpuprof-client: 192.0.2.%d\r\n" % (number // 2)
        ask_in_pieces(api, head + b"x-gpuprof-arrived: %.6f\r\n\r\n0000" % arrived, 1000)
    assert [peer for peer, _ in peers] == ["192.0.2.0", "192.0.2.0", "192.0.2.1"]
    assert [round(age_s) for _, age_s in peers] == [5, 6, 7]
    assert len(api.cached_heads) == 2  # the time is no part of what is compared


def test_a_refused_grpc_call_has_its_status_in_headers(api: HttpApi) -> None:
    connection, transport = connect(api)
    head = b"POST /inference.GRPCInferenceService/Nothing HTTP/1.1\r\nHost: x\r\nContent-Type: application/grpc\r\n"
    send_bytes(connection, head + b"Content-Length: 0\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 200") and b"x-grpc-status: 12\r\n" in transport.written
    assert api._refusals == {("grpc", 501, "not implemented"): 1}


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


HEAD_OF_FOUR = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


@pytest.fixture
def echo(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> list[HttpHead]:
    """Have the server give back bodies; what is returned fills with the heads that were looked up."""
    heads: list[HttpHead] = []

    def answer(client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        client.respond(200, b"x", bytes(body.data))

    def find(head: HttpHead) -> Route:
        heads.append(head)
        return Route(answer, reads_body=True)

    monkeypatch.setattr(api, "_find_path", find)
    return heads


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
def test_requests_of_one_head_get_their_own_bodies_however_cut(api: HttpApi, echo: list[HttpHead], size: int) -> None:
    bodies = [b"%04d" % number for number in range(20)]
    written = ask_in_pieces(api, b"".join(HEAD_OF_FOUR + body for body in bodies), size)
    answers = [part.partition(b"\r\n\r\n")[2] for part in written.split(b"HTTP/1.1 200 OK")[1:]]
    assert answers == bodies
    assert list(api.cached_heads) == [HEAD_OF_FOUR]
    head_count = len(echo)
    api.router.publish([])
    ask_in_pieces(api, HEAD_OF_FOUR + b"0000", 1000)
    assert len(echo) == head_count + 1  # the models have changed: found anew


@pytest.mark.parametrize(
    "head",
    [
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\n",
    ],
)
def test_heads_of_requests_that_are_refused_or_need_more_than_a_small_body_are_not_remembered(
    api: HttpApi, echo: list[HttpHead], head: bytes
) -> None:
    ask_in_pieces(api, head + b"0000", 2000)
    assert not api.cached_heads


def test_no_head_without_the_token_is_remembered(echo: list[HttpHead], api: HttpApi) -> None:
    api._security = Security("right")
    for token in (b"wrong", b"right", b"wrong"):
        head = HEAD_OF_FOUR[:-2] + b"Authorization: Bearer " + token + b"\r\n\r\n"
        written = ask_in_pieces(api, head + b"0000", 1000)
        assert written.startswith(b"HTTP/1.1 200" if token == b"right" else b"HTTP/1.1 401")
    assert len(api.cached_heads) == 1


def test_a_client_of_http_1_0_is_not_told_to_go_on_before_the_answer(api: HttpApi, echo: list[HttpHead]) -> None:
    rest = b"Host: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n0000"
    assert ask_in_pieces(api, b"POST /infer HTTP/1.0\r\n" + rest, 1000).startswith(b"HTTP/1.1 200")
    assert ask_in_pieces(api, b"POST /infer HTTP/1.1\r\n" + rest, 1000).startswith(b"HTTP/1.1 100")
