"""A handshake begins when the first record is whole, and nobody looks again before it is."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from gpuprof.serving.transport.tls_hello import can_begin_tls

HELLO = b"\x16\x03\x01\x02\x00" + bytes(512)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            accepted.setblocking(False)
            yield client, accepted


def is_readable(accepted: socket.socket, within_ms: int) -> bool:
    poller = select.poll()
    poller.register(accepted, select.POLLIN)
    return bool(poller.poll(within_ms))


def test_a_hello_in_pieces_wakes_nobody_until_it_is_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with pytest.raises(BlockingIOError):
        can_begin_tls(accepted)
    woken = 0
    for begin in range(0, len(HELLO), 4):
        client.send(HELLO[begin : begin + 4])
        if is_readable(accepted, 2):
            woken += 1
            assert can_begin_tls(accepted) == (begin + 4 >= len(HELLO))
    assert is_readable(accepted, 30_000) and can_begin_tls(accepted)
    assert woken <= 4
    assert accepted.recv(1000) == HELLO  # nothing of it was taken
    client.send(b"x")
    assert is_readable(accepted, 30_000)


def test_who_ends_without_a_word_begins_no_handshake(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    client.shutdown(socket.SHUT_WR)
    assert is_readable(accepted, 30_000)
    with pytest.raises(ConnectionAbortedError):
        can_begin_tls(accepted)


@pytest.mark.parametrize("sent", [HELLO[:3], HELLO[:100]])
def test_who_ends_in_the_middle_is_noticed(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    client, accepted = pair
    client.sendall(sent)
    assert is_readable(accepted, 30_000) and not can_begin_tls(accepted)
    if len(sent) > 5:
        assert not is_readable(accepted, 20)
    client.shutdown(socket.SHUT_WR)
    assert is_readable(accepted, 30_000) and can_begin_tls(accepted)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"G", b"\x16\x03\x01\xff\xff"])
def test_what_is_no_beginning_of_tls_is_left_to_tls_to_refuse(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    client, accepted = pair
    client.sendall(sent)
    assert is_readable(accepted, 30_000) and can_begin_tls(accepted)
