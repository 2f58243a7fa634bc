"""One gRPC call on a stream of HTTP/2: its messages are taken apart and put together, its end is told.

Source: gRPC's documentation, "gRPC over HTTP2" and "Status codes and their use in gRPC".
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import quote

from gpuprof.serving.protocol.http2_headers import write_headers
from gpuprof.serving.protocol.http2_stream import Http2Stream
from gpuprof.serving.transport.arena import ALIGNMENT, Arena, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference
from gpuprof.serving.transport.wire import Buffer

_PREFIX_BYTES = 5
_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"gzip, deflate"))
_HEAD = write_headers(_HEADERS)
#: What zlib calls them; both come with headers of their own.
_CODINGS = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}


class GrpcStatus(IntEnum):
    """How a call ended."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_OK = write_headers([(b"grpc-status", b"0")])


class GrpcError(Exception):
    """A call ends without an answer.

    Parameters
    ----------
    status : GrpcStatus
    message : str
    """

    def __init__(self, status: GrpcStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Message:
    """A message that was received.

    Attributes
    ----------
    data : bytes-like
    arrived : float
        When it began to (monotonic seconds).
    slot : Slot or None
        Memory of the arena that it lies in, which whoever handles it gives back.
    offset : int
        Where in the arena it begins.
    """

    data: Buffer
    arrived: float
    slot: Slot | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """What answers a call.

    Attributes
    ----------
    handle : callable
        Given the call and a message; answers now or later.
    max_bytes : int
        Of a message.
    streams : bool
        Whether a call has any number of messages, each of which is handled when it is there.
    aligned : callable
        Given the beginning of a large message, returns which of its bytes is to be aligned.
    foresee : callable or None
        Given the call and the beginning of a large message, ends a call that will be refused anyhow; not of a stream.
    """

    handle: Callable[[GrpcCall, Message], None]
    max_bytes: int
    streams: bool = False
    aligned: Callable[[Buffer], int] = len
    foresee: Callable[[GrpcCall, Buffer], None] | None = None


class GrpcCall:
    """Receives the messages of a call and sends those of its answer.

    Parameters
    ----------
    stream : Http2Stream
    headers : dict of bytes to bytes
        Metadata of the client among them.
    method : GrpcMethod
    arena : Arena
        Takes large messages.
    """

    def __init__(self, stream: Http2Stream, headers: dict[bytes, bytes], method: GrpcMethod, arena: Arena) -> None:
        self.headers = headers
        self.waiting: set[Inference] = set()
        self._stream = stream
        self._method = method
        self._arena = arena
        self._prefix = b""
        self._message: Message | None = None
        self._view = memoryview(b"")
        self._filled = 0
        self._whole: Message | None = None
        self._begun = self._ended = False

    # --- the stream's side

    @property
    def is_partial(self) -> bool:
        """Whether the client has begun a message, or owes one."""
        return not self._ended and (not self._method.streams or self._message is not None or bool(self._prefix))

    def sink(self) -> memoryview | None:
        """Return where the rest of a message in the arena is received."""
        return None if self._message is None or self._message.slot is None else self._view[self._filled :]

    def advance(self, count: int) -> None:
        """Take bytes that were received in the sink."""
        self._filled += count
        if self._filled == len(self._view):
            self._finish_message()

    def feed(self, piece: memoryview) -> None:
        """Take bytes that are not where they belong."""
        try:
            while len(piece) and self._stream.is_open:
                piece = piece[self._take(piece) :]
        except GrpcError as error:
            self.fail(error.status, str(error))

    def ended(self) -> None:
        """Handle the message of a call that has one; a stream ends when all are answered."""
        self._ended = True
        whole, self._whole = self._whole, None
        if self._message is not None or self._prefix:
            self.fail(GrpcStatus.INTERNAL, "the message is not whole")
        elif self._method.streams:
            self.settle()
        elif whole is None:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "the call has no message")
        else:
            self._method.handle(self, whole)

    def gone(self) -> None:
        """Give back what was received, and wait for nothing more."""
        for message in (self._message, self._whole):
            if message is not None and message.slot is not None:
                self._arena.give_back(message.slot)
        self._message = self._whole = None
        for inference in self.waiting:
            inference.cancelled = True

    # --- the server's side

    def answer(self, parts: Sequence[Buffer], slot: Slot | None = None) -> None:
        """Send a message; a call that is no stream ends with it. ``slot``, which parts lie in, is given back."""
        head = b"" if self._begun else _HEAD
        self._begun = True
        prefix = b"\0" + sum(map(len, parts)).to_bytes(4, "big")
        slots = () if slot is None else (slot,)
        self._stream.send(head, [prefix, *parts], slots, None if self._method.streams else _OK)

    def fail(self, status: GrpcStatus, message: str, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """End the call without an answer, or with no further one."""
        text = quote(message, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}").encode()
        headers = () if self._begun else _HEADERS[:2]
        trailers = [*headers, (b"grpc-status", b"%d" % status), (b"grpc-message", text), *more]
        self._stream.send(trailers=write_headers(trailers))

    def settle(self) -> None:
        """End a stream whose client has said everything, when everything is answered."""
        if self._ended and not self.waiting:
            self._stream.send(b"" if self._begun else _HEAD, trailers=_OK)

    # --- reading

    def _take(self, piece: memoryview) -> int:
        """Take bytes up to the end of a prefix or of a message; return how many."""
        if self._message is None:
            count = _PREFIX_BYTES - len(self._prefix)
            self._prefix += piece[:count]
            if len(self._prefix) == _PREFIX_BYTES:
                self._begin_message(piece[count:])
            return count
        count = min(len(piece), len(self._view) - self._filled)
        self._view[self._filled : self._filled + count] = piece[:count]
        self.advance(count)
        return count

    def _begin_message(self, ahead: memoryview) -> None:
        """Make room for a message; ``ahead`` is what is already there of it, and perhaps more."""
        size = int.from_bytes(self._prefix[1:], "big")
        if self._whole is not None:
            raise GrpcError(GrpcStatus.INVALID_ARGUMENT, "the call has more than one message")
        if size > self._method.max_bytes:
            limit = self._method.max_bytes
            raise GrpcError(GrpcStatus.RESOURCE_EXHAUSTED, f"the message has {size} bytes, more than {limit}")
        if size > INLINE_BYTES and self._method.foresee is not None and not self._prefix[0]:
            self._method.foresee(self, ahead[:size])
            if not self._stream.is_open:
                return
        self._message = Message(b"", time.monotonic())
        self._filled = 0
        if size > INLINE_BYTES:
            self._reserve(self._message, size, ahead)
        else:
            self._view = memoryview(bytearray(size))
        if not size:
            self._finish_message()

    def _reserve(self, message: Message, size: int, ahead: memoryview) -> None:
        """Take memory for a large message, placed so that its first tensor is aligned."""
        message.slot = self._arena.take(size + ALIGNMENT)
        if message.slot is None:
            raise GrpcError(GrpcStatus.RESOURCE_EXHAUSTED, "the server has no memory left for this request")
        message.offset = message.slot.offset + -self._method.aligned(ahead) % ALIGNMENT
        self._view = self._arena.view(message.offset, size)

    def _finish_message(self) -> None:
        message, self._message = self._message, None
        assert message is not None
        message.data = self._view if message.slot is not None else bytes(self._view)
        compressed, self._prefix = self._prefix[0], b""
        if compressed:
            try:
                message = self._decompressed(message)
            except GrpcError as error:
                self.fail(error.status, str(error))
                return
        if self._method.streams:
            self._method.handle(self, message)
        else:
            self._whole = message

    def _decompressed(self, message: Message) -> Message:
        coding = self.headers.get(b"grpc-encoding", b"")
        limit = self._method.max_bytes
        try:
            if coding not in _CODINGS:
                raise GrpcError(GrpcStatus.UNIMPLEMENTED, "messages may be compressed by gzip or deflate")
            data = zlib.decompressobj(_CODINGS[coding]).decompress(message.data, limit + 1)
            if len(data) > limit:
                raise GrpcError(GrpcStatus.RESOURCE_EXHAUSTED, f"the message has more than {limit} bytes")
        except zlib.error:
            raise GrpcError(GrpcStatus.INTERNAL, "the message cannot be decompressed") from None
        finally:
            if message.slot is not None:
                self._arena.give_back(message.slot)
        return Message(data, message.arrived)
