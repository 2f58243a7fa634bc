"""What clients can do by TLS to a server that they have no token for; `bench.hostile` measures what it does."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress

from bench.hostile_server import AttackTarget

_CONNECTIONS, _RECORDS = 10, 1 << 15
_HTTP = b"POST /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n".ljust(_RECORDS, b"x")
#: Preface, settings, their acknowledgement, and DATA for a call that there is not.
_HTTP2 = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\0\0\4\1\0\0\0\0" + b"\0\x40\0\0\0\0\0\0\1" + bytes(1 << 14)
)


def http_records_of_a_byte(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send a body for nothing, a byte in each record of TLS."""
    _send_bytewise(target.http, "http/1.1", _HTTP, goes_on)


def grpc_records_of_a_byte(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send a frame of HTTP/2, a byte in each record of TLS."""
    _send_bytewise(target.grpc, "h2", _HTTP2, goes_on)


def _send_bytewise(port: int, protocol: str, data: bytes, goes_on: Callable[[], bool]) -> None:
    """Encrypt the same for some connections, send it on all of them, and begin again."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    while goes_on():
        with ExitStack() as opened:
            prepared = []
            for _ in range(_CONNECTIONS):
                with suppress(OSError):
                    connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
                    prepared.append((connection, _encrypt_bytewise(connection, context, data)))
            for connection, records in prepared:
                with suppress(OSError):
                    connection.sendall(records)


def _encrypt_bytewise(connection: socket.socket, context: ssl.SSLContext, data: bytes) -> bytes:
    """Shake hands; return ``data`` in records of a byte."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    encrypted = context.wrap_bio(received, sent)
    while True:
        try:
            encrypted.do_handshake()
            break
        except ssl.SSLWantReadError:
            connection.sendall(sent.read())
            received.write(connection.recv(1 << 16))
    for byte in data:
        encrypted.write(bytes([byte]))
    return sent.read()
