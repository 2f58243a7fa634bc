"""The question of how far grpcio has come with the calls that it was given: a call of the relay's own.

grpcio begins with calls in the order in which they come, so that its answer says that it has begun with those before.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, PREFACE, ServerFrames
from gpuprof.serving.protocol.open_calls import OpenCalls
from gpuprof.serving.protocol.poller import Poller

#: There is no such method, and everybody may learn that: grpcio's shortest answer.
QUESTION_PATH = "/gpuprof.Relay/Question"
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_HEADERS, _END_STREAM_AND_HEADERS = 1, 5
_PONG, _PING_BYTES = b"\0\0\x08\6\1\0\0\0\0", 8
_READ_BYTES = 1 << 14
#: A connection that was not used for so long may be about to be closed by grpcio.
_UNUSED_S = 30.0
#: A question that has no answer for so long is not waited for.
_PATIENCE_S = 5.0


class BegunQuestion:
    """Asks grpcio over a connection of its own, which is made when it is needed.

    Parameters
    ----------
    poller : Poller
    connect : callable
        Returns a connection to grpcio, non-blocking. Raises `OSError` where there is none.
    on_answer : callable
        Called once for each question; where the connection ends or cannot be made, that is an answer, too.
    """

    def __init__(self, poller: Poller, connect: Callable[[], socket.socket], on_answer: Callable[[], None]) -> None:
        self._poller, self._connect, self._on_answer = poller, connect, on_answer
        self._grpcio: socket.socket | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._calls = OpenCalls()
        self._answers = ServerFrames(self._calls)
        self._stream, self._unsent, self._used = 1, b"", 0.0

    def ask(self) -> None:
        """Ask."""
        now = time.monotonic()
        if now > self._used + _UNUSED_S and not self._calls:
            self.close()
        self._used = now
        try:
            if self._grpcio is None:
                self._open()
        except OSError:
            self._on_answer()
            return
        self._calls.begin(self._stream)
        self._unsent += struct.pack(">IBI", len(_HEAD) << 8 | _HEADERS, _END_STREAM_AND_HEADERS, self._stream) + _HEAD
        self._stream += 2
        if self._answers.has_begun:
            self._send()

    def check(self, now: float) -> None:
        """Give questions up that have waited too long: the router stands still, or the connection is no good."""
        if self._calls and now > self._used + _PATIENCE_S:
            self._close_answered()

    def close(self) -> None:
        """Close the connection; what was asked has no answer."""
        if self._grpcio is not None:
            self._poller.unwatch(self._grpcio)
            self._grpcio.close()
            self._grpcio, self._calls = None, OpenCalls()

    def _open(self) -> None:
        self._grpcio = self._connect()
        self._calls = OpenCalls()
        self._answers = ServerFrames(self._calls)
        self._stream, self._unsent = 1, PREFACE + _SETTINGS + ACKNOWLEDGEMENT
        self._poller.watch(self._grpcio, select.EPOLLIN, self._hear)

    def _send(self) -> None:
        assert self._grpcio is not None
        unsent, self._unsent = self._unsent, b""
        with suppress(OSError):  # of its end, which answers, the poller tells
            self._grpcio.sendall(unsent)

    def _hear(self, _: int) -> None:
        assert self._grpcio is not None
        waiting, size = len(self._calls), 0
        with suppress(OSError):
            size = self._grpcio.recv_into(self._buffer)
            self._answers.follow(self._buffer, size)
            if len(ping := self._answers.ping) == _PING_BYTES:
                # When it stops, grpcio waits for 20 s for the answer of each connection.
                self._unsent, self._answers.ping = self._unsent + _PONG + ping, b""
            if self._unsent:  # grpcio has said its settings, which are acknowledged
                self._send()
        for _ in range(waiting - len(self._calls)):
            self._on_answer()
        if not size:
            self._close_answered()

    def _close_answered(self) -> None:
        """Close the connection; what was asked is answered by that."""
        waiting = len(self._calls)
        self.close()
        for _ in range(waiting):
            self._on_answer()


def _literal(name: str, value: str) -> bytes:
    """Return a header as HPACK (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


_HEAD = b"".join(
    _literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", QUESTION_PATH),
        (":authority", "relay"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)
