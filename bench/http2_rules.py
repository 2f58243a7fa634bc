"""How a server answers clients that break the rules of HTTP/2: ours beside grpcio's own, rule by rule.

    python -m bench.http2_rules

Each case breaks one rule of RFC 9113 or RFC 7541, sends a PING after it, and looks at what comes back: GOAWAY or the
end of the connection, RST_STREAM, or the answer to the PING as if nothing had been wrong. What the RFC asks for is a
connection error (C), an error of the stream or of the connection (S), or nothing (-).
"""

from __future__ import annotations

import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from bench.serving import grpc_echo, grpc_server

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_TIMEOUT_S, _SILENCE_S = 5.0, 0.3
_TRIES = 6
_MARK = b"the mark"
#: ":method POST", ":scheme http", and, as literals, ":path /a/b", ":authority x", "te trailers", "content-type".
_PATH = b"\x04\x04/a/b"
_HEAD = (
    b"\x83\x86" + _PATH + b"\x01\x01x" + b"\x00\x02te\x08trailers" + b"\x00\x0ccontent-type\x10application/grpc"
)  # fmt: skip


def frame(kind: int, flags: int, stream: int, body: bytes = b"", size: int | None = None) -> bytes:
    """Return a frame; ``size`` is what it says of its length where that is wrong."""
    length = len(body) if size is None else size
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


@dataclass(frozen=True)
class Rule:
    """A rule: where it stands, what is sent that breaks it, and what is due: ``"C"``, ``"S"`` or ``"-"``."""

    name: str
    sent: bytes
    due: str


def _open(stream: int = 1, head: bytes = _HEAD, flags: int = _END_HEADERS) -> bytes:
    return frame(_HEADERS, flags, stream, head)


def rules() -> list[Rule]:
    """Return all cases."""
    window = struct.pack(">I", (1 << 31) - 1)
    return [
        Rule("4.1 frame of an unknown kind", frame(22, 0, 0, bytes(8)), "-"),
        Rule("4.2 frame larger than allowed", _open() + frame(_DATA, 0, 1, bytes(1 << 14) + b"a"), "S"),
        Rule("4.3 headers that cannot be decoded", _open(head=b"\xff\xff\xff\xff\xff\xff\xff\xff"), "C"),
        Rule("4.3 another frame between headers", _open(flags=0) + frame(_PING, 0, 0, bytes(8)), "C"),
        Rule("4.3 headers of another stream between", _open(flags=0) + _open(3), "C"),
        Rule("5.1 DATA on an idle stream", frame(_DATA, 0, 1, b"a"), "C"),
        Rule("5.1 RST_STREAM on an idle stream", frame(_RST, 0, 1, bytes(4)), "C"),
        Rule("5.1 WINDOW_UPDATE on an idle stream", frame(_WINDOW, 0, 1, b"\0\0\0\1"), "C"),
        Rule("5.1 CONTINUATION on an idle stream", frame(_CONTINUATION, _END_HEADERS, 1, _HEAD), "C"),
        Rule("5.1.1 stream with an even number", _open(2), "C"),
        Rule("5.1.1 stream with a smaller number", _open(5) + _open(3), "C"),
        Rule("5.3 a stream that depends on itself", frame(_PRIORITY, 0, 1, b"\0\0\0\1\0"), "S-"),
        Rule("6.1 DATA on stream 0", frame(_DATA, 0, 0, b"a"), "C"),
        Rule("6.1 padding longer than DATA", _open() + frame(_DATA, _PADDED, 1, b"\x09abc"), "C"),
        Rule("6.2 HEADERS on stream 0", _open(0), "C"),
        Rule("6.3 PRIORITY on stream 0", frame(_PRIORITY, 0, 0, bytes(5)), "C"),
        Rule("6.3 PRIORITY of 4 bytes", frame(_PRIORITY, 0, 1, bytes(4)), "S"),
        Rule("6.4 RST_STREAM on stream 0", frame(_RST, 0, 0, bytes(4)), "C"),
        Rule("6.4 RST_STREAM of 3 bytes", _open() + frame(_RST, 0, 1, bytes(3)), "C"),
        Rule("6.5 SETTINGS with ACK and a body", frame(_SETTINGS, _ACK, 0, bytes(6)), "C"),
        Rule("6.5 SETTINGS on a stream", frame(_SETTINGS, 0, 1), "C"),
        Rule("6.5 SETTINGS of 5 bytes", frame(_SETTINGS, 0, 0, bytes(5)), "C"),
        Rule("6.5.2 ENABLE_PUSH of 2", frame(_SETTINGS, 0, 0, struct.pack(">HI", 2, 2)), "C"),
        Rule("6.5.2 INITIAL_WINDOW_SIZE too large", frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), "C"),
        Rule("6.5.2 MAX_FRAME_SIZE too small", frame(_SETTINGS, 0, 0, struct.pack(">HI", 5, 100)), "C"),
        Rule("6.5.2 unknown setting", frame(_SETTINGS, 0, 0, struct.pack(">HI", 99, 1)), "-"),
        Rule("6.6 PUSH_PROMISE of a client", _open() + frame(_PUSH, _END_HEADERS, 1, b"\0\0\0\2" + _HEAD), "C"),
        Rule("6.7 PING on a stream", frame(_PING, 0, 1, bytes(8)), "C"),
        Rule("6.7 PING of 6 bytes", frame(_PING, 0, 0, bytes(6)), "C"),
        Rule("6.7 PING with ACK", frame(_PING, _ACK, 0, bytes(8)), "-"),
        Rule("6.8 GOAWAY on a stream", frame(_GOAWAY, 0, 1, bytes(8)), "C"),
        Rule("6.9 WINDOW_UPDATE of 0 for the connection", frame(_WINDOW, 0, 0, bytes(4)), "C"),
        Rule("6.9 WINDOW_UPDATE of 0 for a stream", _open() + frame(_WINDOW, 0, 1, bytes(4)), "S"),
        Rule("6.9 WINDOW_UPDATE of 3 bytes", frame(_WINDOW, 0, 0, bytes(3)), "C"),
        Rule("6.9.1 window of the connection too large", frame(_WINDOW, 0, 0, window) * 2, "C"),
        Rule("6.9.1 window of a stream too large", _open() + frame(_WINDOW, 0, 1, window) * 2, "S"),
        Rule("6.10 CONTINUATION on stream 0", _open(flags=0) + frame(_CONTINUATION, _END_HEADERS, 0, b""), "C"),
        Rule("6.10 CONTINUATION after the end", _open() + frame(_CONTINUATION, _END_HEADERS, 1, b"\x83"), "C"),
        Rule("8.2 header name in capitals", _open(head=_HEAD + b"\x00\x01A\x01b"), "S"),
        Rule("8.3 unknown pseudo-header", _open(head=b"\x00\x02:a\x01b" + _HEAD), "S"),
        Rule("8.3 pseudo-header after others", _open(head=_HEAD[:3] + b"\x00\x01a\x01b" + _HEAD[3:]), "S"),
        Rule("8.2.2 header of a connection", _open(head=_HEAD + b"\x00\x0aconnection\x05close"), "S"),
        Rule("8.3.1 no :path", _open(head=_HEAD.replace(_PATH, b"")), "S"),
        Rule("8.3.1 :method twice", _open(head=b"\x83" + _HEAD), "S"),
        Rule("7541 2.3.3 index beyond the tables", _open(head=_HEAD + b"\xc6"), "C"),
        Rule("7541 4.2 table larger than allowed", _open(head=b"\x3f\xe1\xff\x03" + _HEAD), "C"),
        Rule("7541 6.1 index 0", _open(head=_HEAD + b"\x80"), "C"),
    ]


def react(port: int, sent: bytes) -> str:
    """Return what comes of it: ``"C"``, ``"S"``, or ``"-"`` where the connection goes on as if nothing were wrong."""
    got = b""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0) + sent)
        with suppress(ConnectionError):
            connection.sendall(frame(_PING, 0, 0, _MARK))
        try:
            while piece := connection.recv(1 << 16):
                got += piece
                if frame(_PING, _ACK, 0, _MARK) in got:
                    connection.settimeout(_SILENCE_S)  # an error of a stream may come later
        except TimeoutError:
            errors = _errors(got)
            return "C" if _GOAWAY in errors else "S" if _RST in errors else "-"
    return "C"


def _errors(data: bytes) -> set[int]:
    """Return the kinds of frames that tell of an error; RST_STREAM with the code 0 does not."""
    kinds, position = set(), 0
    while position + 9 <= len(data):
        end = position + 9 + int.from_bytes(data[position : position + 3], "big")
        kind = data[position + 3]
        if kind == _GOAWAY or (kind == _RST and any(data[position + 9 : end])):
            kinds.add(kind)
        position = end
    return kinds


def keeps(rule: Rule, reaction: str) -> bool:
    """Return whether a reaction is what is due; who closes the connection where a stream would do has kept it, too."""
    return reaction in {"C": "C", "S": "SC", "-": "-", "S-": "SC-"}[rule.due]


def compare(ours: int, bare: int) -> list[tuple[Rule, str, str]]:
    """Return how the servers at two ports react to each case."""
    cases = rules()
    with ThreadPoolExecutor(24) as pool:
        own, other = (pool.map(_react_at_best, [port] * len(cases), cases) for port in (ours, bare))
        return list(zip(cases, own, other, strict=True))


def _react_at_best(port: int, rule: Rule) -> str:
    """Return the reaction that is due where one of some tries had it, else the last one.

    What comes first in the stack, the end of a call that it refuses or the reset of its stream, is a matter of chance:
    of requests without a path it reset 46 of 60, under ours 48.
    """
    reaction = ""
    for _ in range(_TRIES):
        reaction = react(port, rule.sent)
        if keeps(rule, reaction):
            break
    return reaction


def main() -> int:
    """Print what came of every case; 0 when ours keeps every rule that grpcio's own server keeps."""
    with grpc_server("null:4", 1) as (_, _, ours), grpc_echo() as (_, bare):
        found = compare(ours, bare)
    print(f"{'rule':45s} {'due':>4s} {'ours':>5s} {'grpcio':>7s}")
    for rule, own, other in found:
        print(f"{rule.name:45s} {rule.due:>4s} {own:>5s} {other:>7s}")
    own_count = sum(keeps(rule, own) for rule, own, _ in found)
    other_count = sum(keeps(rule, other) for rule, _, other in found)
    print(f"kept: {own_count} of {len(found)}, by grpcio's own server {other_count}")
    return 0 if all(keeps(rule, own) or not keeps(rule, other) for rule, own, other in found) else 1


if __name__ == "__main__":
    sys.exit(main())
