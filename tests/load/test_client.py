"""The client that sends requests when they are due, against servers that behave in every way."""

import math
import socket
import threading
import time
from collections.abc import Callable

import pytest

from gpuprof.load.client import LoadClient, Schedule, SentRequests, ServerTimes, read_times
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Serve = Callable[[socket.socket], None]


def sent_to(serve: Serve, times: list[float], request: bytes = REQUEST) -> SentRequests:
    """Send the requests to a server that does ``serve`` with each connection, and return what became of them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()
        schedule = Schedule("127.0.0.1", port, ((request,),), times, [0] * len(times), 20.0)
        return LoadClient(schedule).run(time.monotonic())


def _accept(listener: socket.socket, serve: Serve) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the test is over
            return
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def answer_all(connection: socket.socket) -> None:
    with connection:
        while received := connection.recv(1 << 16):
            assert received.endswith(REQUEST)
            connection.sendall(ANSWER)


def answer_once(connection: socket.socket) -> None:
    with connection:
        connection.recv(1 << 16)
        connection.sendall(ANSWER)


def test_requests_are_answered_over_connections_that_are_kept() -> None:
    opened = []

    def serve(connection: socket.socket) -> None:
        opened.append(connection)
        answer_all(connection)

    sent = sent_to(serve, [0.05 * k for k in range(30)])
    assert list(sent.status) == [200] * 30
    assert len(opened) < 20  # one where the machine goes on all the time; more where it stands still meanwhile
    assert all(0.0 <= begun <= done for begun, done in zip(sent.sent_s, sent.done_s, strict=True))


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again() -> None:
    assert list(sent_to(answer_once, [0.0, 0.5, 1.0]).status) == [200] * 3


def test_requests_to_nobody_are_lost_and_not_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sent = LoadClient(Schedule("127.0.0.1", port, ((REQUEST,),), [0.0, 0.1], [0, 0])).run(time.monotonic())
    assert list(sent.status) == [0, 0]


def test_a_large_request_comes_over_whole_however_often_it_is_sent() -> None:
    texts: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            left, text = len(MIXED), b""
            while piece := connection.recv(1 << 16):
                text, left = text + piece, left - len(piece)
                if not left:
                    texts.append(text)
                    connection.sendall(ANSWER)
                    left, text = len(MIXED), b""

    assert list(sent_to(serve, [0.0, 0.0, 0.3], MIXED).status) == [200] * 3
    assert texts == [MIXED] * 3


MIXED = REQUEST + bytes(range(251)) * (5 * 2**20 // 251)


def test_an_answer_is_as_long_as_its_content_whatever_other_lengths_its_head_has() -> None:
    tensors = b'{"outputs":[]}' + bytes(5000)
    head = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 14\r\nContent-Type: application/octet-stream\r\n"
    answer = head + f"Content-Length: {len(tensors)}\r\n\r\n".encode() + tensors

    def serve(connection: socket.socket) -> None:  # as Triton answers, in two parts
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(answer[:200])
                time.sleep(0.02)
                connection.sendall(answer[200:])

    sent = sent_to(serve, [0.0, 0.3, 0.6])
    assert list(sent.status) == [200] * 3
    assert all(done - begun > 0.015 for begun, done in zip(sent.sent_s, sent.done_s, strict=True))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
    ],
)
def test_a_connection_that_the_server_will_close_is_not_used_again(answer: bytes) -> None:
    opened = []

    def serve(connection: socket.socket) -> None:
        opened.append(connection)
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
            if b"Content-Length" in answer:
                time.sleep(0.3)  # a server that closes late: the client sees an open connection
                assert connection.recv(1 << 16, socket.MSG_DONTWAIT) == b""  # the client has closed it

    sent = sent_to(serve, [0.05 * k for k in range(10)])
    assert list(sent.status) == [200] * 10
    assert len(opened) == 10


def test_a_server_of_http_1_0_may_keep_its_connections() -> None:
    opened = []

    def serve(connection: socket.socket) -> None:
        opened.append(connection)
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\n{}")

    assert list(sent_to(serve, [0.0, 0.5, 1.0]).status) == [200] * 3
    assert len(opened) == 1


def test_a_chunked_answer_ends_with_its_last_chunk() -> None:
    def serve(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r")
                time.sleep(0.05)
                connection.sendall(b"\n0\r\n\r\n")

    sent = sent_to(serve, [0.0, 0.3])
    assert list(sent.status) == [200] * 2
    assert all(done - begun > 0.04 for begun, done in zip(sent.sent_s, sent.done_s, strict=True))


@pytest.mark.parametrize(
    ("value", "total_ms"),
    [
        (b"queue;dur=-1, infer;dur=x, total;dur=4.200", 4.2),
        (b'total;desc="all of it";dur="7.5"', 7.5),
        (b" db;dur=3 , total ; dur = 4", 4.0),
        (b"cache;desc=hit, db;dur=3", math.nan),
        (b"total", math.nan),
        (b"total;dur=soon", math.nan),
        (b"total;dur=nan", math.nan),
        (b"total;dur=-3", math.nan),
        (b"", math.nan),
    ],
)
def test_only_a_total_that_can_be_one_is_read_from_other_servers(value: bytes, total_ms: float) -> None:
    assert read_times(value) == pytest.approx(ServerTimes(total_ms=total_ms), nan_ok=True)
