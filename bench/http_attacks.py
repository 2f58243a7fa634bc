"""What clients can do to the HTTP port of a server that means them well; `bench.hostile` measures what it does."""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from bench.hostile_server import TOKEN, AttackTarget

_BURST_BYTES = 1 << 16
_CONNECTIONS = 100


def slow_heads(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads a byte at a time on hundreds of connections."""
    connections = [socket.create_connection(("127.0.0.1", target.http)) for _ in range(200)]
    while goes_on():
        for connection in connections:
            with suppress(OSError):
                connection.sendall(b"a")
        time.sleep(0.05)
    for connection in connections:
        connection.close()


def announced_bodies(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Announce 64 MB again and again and send little of it."""
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Length: {64 << 20}\r\n\r\n"
    connections: list[socket.socket] = []
    while goes_on():
        if len(connections) < 200:
            connections.append(socket.create_connection(("127.0.0.1", target.http)))
            with suppress(OSError):
                connections[-1].sendall(head.encode() + bytes(50_000))
        time.sleep(0.001)
    for connection in connections:
        connection.close()


def large_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send 15 MB of JSON again and again."""
    _post_json(target, goes_on, b'{"inputs": [' + b"[]," * 5_000_000 + b"[]]}")


def deep_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send lists in lists as deep as 250 KB allow, which the router reads itself."""
    _post_json(target, goes_on, b"[" * 125_000 + b"]" * 125_000)


def wide_json(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send as many empty lists as 250 KB allow, which the router reads itself."""
    _post_json(target, goes_on, b'{"inputs": [' + b"[]," * 80_000 + b"[]]}")


def json_without_token(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send 15 MB of JSON without the token."""
    _post_json(target, goes_on, b"[" + b"[]," * 5_000_000 + b"[]]", token="")


def pipelined_requests(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask whether the server is ready a thousand times at once, and read the answers as fast as they come."""
    _pour(target, goes_on, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n", 4)


def pipelined_metrics(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for the metrics a thousand times at once."""
    _pour(target, goes_on, f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(), 4)


def many_headers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads of thousands of headers on many connections."""
    headers = b"".join(b"a%d:b\r\n" % number for number in range(3500))
    _pour(target, goes_on, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n", _CONNECTIONS)


def unknown_models(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for models that there are not, by names as long as an address may be."""
    name = b"m" * 4000
    head = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 0\r\n\r\n"
    _pour(target, goes_on, head % (name, TOKEN.encode()), _CONNECTIONS)


def chunks_of_a_byte(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send bodies in chunks of a byte, to an address that takes none and asks for no token."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _pour(target, goes_on, head + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n", _CONNECTIONS)


def connections_that_end(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Connect and close, hundreds at once."""
    while goes_on():
        with ExitStack() as opened, suppress(OSError):
            for _ in range(_CONNECTIONS):
                opened.enter_context(socket.create_connection(("127.0.0.1", target.http), timeout=5.0))


def handshakes(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Begin TLS on many connections at once, as far as the server's certificate, and close them."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    ended, begun = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ended, begun).do_handshake()
    hello = begun.read()
    while goes_on():
        with ExitStack() as opened, suppress(OSError):
            connections = [
                opened.enter_context(socket.create_connection(("127.0.0.1", target.http), timeout=5.0))
                for _ in range(_CONNECTIONS)
            ]
            for connection in connections:
                connection.sendall(hello)
            for connection in connections:
                connection.recv(1 << 14)


def unread_answers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for large answers on hundreds of connections, and read none of them."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 150_000], "parameters": {"binary_data_size": 600_000}}
    with ExitStack() as opened:
        request = _infer_request("m", {"inputs": [entry], "parameters": {"binary_data_output": True}}, bytes(600_000))
        count = 0
        while goes_on():
            if count < 2 * _CONNECTIONS:
                with suppress(OSError):
                    connection = opened.enter_context(socket.create_connection(("127.0.0.1", target.http)))
                    connection.settimeout(5.0)
                    connection.sendall(request)
                    count += 1
            else:
                time.sleep(0.05)


def bodies_by_the_byte(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send large bodies a byte at a time on hundreds of connections."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 150_000], "parameters": {"binary_data_size": 600_000}}
    request = _infer_request("m", {"inputs": [entry]}, bytes(600_000))
    with ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", target.http))) for _ in range(_CONNECTIONS)
        ]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request[:40_000])
        while goes_on():
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b"\0")


def many_strings(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send tensors of millions of empty strings, as binary data."""
    count = 4_000_000
    entry = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    _exchange(target, goes_on, [_infer_request("m", {"inputs": [entry]}, struct.pack("<I", 0) * count)])


def long_shapes(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send shapes of a hundred thousand dimensions, in texts that the router reads itself."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1] * 120_000, "data": [0.0]}
    _exchange(target, goes_on, [_infer_request("m", {"inputs": [entry]}, b"")])


def bodies_for_nothing(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send nearly a megabyte of a body to an address that reads none, on hundreds of connections, and stop."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    _hold(target, goes_on, head + bytes(900_000))


def chunks_for_nothing(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send nearly a megabyte in chunks to an address that reads no body, on hundreds of connections, and stop."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _hold(target, goes_on, head + b"10000\r\n%s\r\n" % bytes(1 << 16) * 14)


def endless_trailers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send trailers behind a chunked body that do not end."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    _pour(target, goes_on, head + b"a: b\r\n" * 1_000_000, 8)


def unread_health(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask whether the server is ready, thousands of times on hundreds of connections, and read no answer."""
    _hold(target, goes_on, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000)


def half_closed(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask a thousand times at once, close that side, read a little, connect again."""
    burst = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    while goes_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.http), timeout=5.0) as connection:
            connection.sendall(burst)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 12)


def silent_handshakes(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Connect where TLS is spoken, on thousands of connections, and say nothing."""
    _hold(target, goes_on, b"\x16\x03\x01\x02\x00", 2000)


def long_identifiers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send identifiers of megabytes, which answers repeat."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 150_000], "parameters": {"binary_data_size": 600_000}}
    _exchange(target, goes_on, [_infer_request("m", {"id": "\x7f" * 10_000_000, "inputs": [entry]}, bytes(600_000))])


def calls_for_nobody(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask a model for answers without the token, as fast as they are refused."""
    _pour(target, goes_on, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", _CONNECTIONS)


def long_numbers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send numbers of a hundred thousand digits."""
    text = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%s],"data":[%s.%s]}]}'
    digits = b"1" * 80_000
    request = text % (digits, digits, digits)
    head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
    _exchange(target, goes_on, [(head % (TOKEN, len(request))).encode() + request])


def _hold(target: AttackTarget, goes_on: Callable[[], bool], request: bytes, count: int = 250) -> None:
    """Send as much of a request as is taken on each of so many connections, then nothing; read nothing."""
    with ExitStack() as opened:
        connections: list[socket.socket] = []
        while goes_on():
            if len(connections) == count:
                time.sleep(0.05)
                continue
            with suppress(OSError):
                connections.append(opened.enter_context(socket.create_connection(("127.0.0.1", target.http))))
                connections[-1].settimeout(0.02)
                connections[-1].sendall(request)


def _infer_request(model: str, document: object, tensors: bytes) -> bytes:
    text = json.dumps(document, separators=(",", ":")).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {TOKEN}",
        f"Content-Length: {len(text) + len(tensors)}",
        f"Inference-Header-Content-Length: {len(text)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text + tensors


def _exchange(target: AttackTarget, goes_on: Callable[[], bool], requests: Sequence[bytes]) -> None:
    """Send requests, each on a connection of its own, and wait until there is something of an answer."""
    while goes_on():
        for request in requests:
            with suppress(OSError), socket.create_connection(("127.0.0.1", target.http), timeout=10.0) as connection:
                connection.sendall(request)
                connection.recv(1 << 16)


def _pour(target: AttackTarget, goes_on: Callable[[], bool], request: bytes, count: int) -> None:
    """Send a request again and again on so many connections, as fast as they take it; read and drop what comes."""
    burst = memoryview(request * max(1, _BURST_BYTES // len(request)))
    sent: dict[socket.socket, int] = {}
    try:
        while goes_on():
            while len(sent) < count:
                connection = socket.create_connection(("127.0.0.1", target.http), timeout=5.0)
                connection.setblocking(False)
                sent[connection] = 0
            readable, writable, _ = select.select(list(sent), list(sent), [], 0.1)
            for connection in {*readable, *writable}:
                try:
                    if connection in readable and not connection.recv(1 << 18):
                        raise ConnectionError("it was closed")
                    if connection in writable:
                        sent[connection] = (sent[connection] + connection.send(burst[sent[connection] :])) % len(burst)
                except BlockingIOError:
                    pass
                except OSError:
                    connection.close()
                    del sent[connection]
    except OSError:  # nobody listens any more, or there are no files left
        pass
    finally:
        for connection in sent:
            connection.close()


def _post_json(target: AttackTarget, goes_on: Callable[[], bool], body: bytes, token: str = TOKEN) -> None:
    while goes_on():
        connection = target.client()
        with suppress(OSError):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("POST", "/v2/models/m/infer", body, headers)
            connection.getresponse().read()
        connection.close()
