"""One HTTP/1.1 connection: large bodies are received straight into the arena and large answers sent from it.

A framework would copy every tensor several times on its way; at half a megabyte a request that is most of the cost
of serving. So heads are parsed by httptools and bodies are read where they are needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import orjson

from gpuprof.serving.arena import ALIGNMENT, Arena, Slot
from gpuprof.serving.batch_io import INLINE_BYTES
from gpuprof.serving.http_message import (
    CONTENT_JSON,
    ChunkedBody,
    HttpHead,
    chunk_parser,
    read_head,
    too_large,
    write_head,
)
from gpuprof.serving.infer_request import Body
from gpuprof.serving.inference import RefusedError, bad_request
from gpuprof.serving.wire import Buffer

SCRATCH_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 15
_MAX_PENDING_BYTES = 1 << 18
_MAX_DISCARDED_BYTES = 1 << 20
_LINGER_S = 2.0
_ABOUT_TO_ASK_S = 1.0
_MAX_LINGERING_BYTES = 1 << 24
_JSON_LENGTH = b"inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a request.

    Attributes
    ----------
    handle : callable
        Given the connection, the head and the body; answers by `HttpConnection.respond` now or later.
    max_body : int
        Bytes that the body may have.
    in_arena : bool
        Whether a large body is to be received in the arena.
    """

    handle: Callable[[HttpConnection, HttpHead, ReceivedBody], None]
    max_body: int = _MAX_DISCARDED_BYTES
    in_arena: bool = False


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """A body, the memory that it holds, and when it began to arrive (monotonic seconds)."""

    body: Body
    slot: Slot | None
    arrived: float


class Site(Protocol):
    """What connections share."""

    arena: Arena
    scratch: bytearray
    connections: set[HttpConnection]

    @property
    def draining(self) -> bool:
        """Whether connections are to be closed after their answer."""
        ...

    def route(self, head: HttpHead) -> Route:
        """Return what answers this request.

        Raises
        ------
        RefusedError
            404, 405, …
        """
        ...


@dataclass(slots=True)
class _Incoming:
    """A request whose body is being received."""

    head: HttpHead
    route: Route
    arrived: float
    length: int
    json_bytes: int
    refusal: RefusedError | None = None
    slot: Slot | None = None
    start: int = 0
    received: int = 0
    view: memoryview | None = None
    chunks: tuple[httptools.HttpRequestParser, ChunkedBody] | None = None
    data: bytearray = field(default_factory=bytearray)


class HttpConnection(asyncio.BufferedProtocol):
    """Reads requests one after another and writes their answers.

    Parameters
    ----------
    site : Site
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._incoming: _Incoming | None = None
        self._unsent: list[Slot] = []
        self._paused = False
        self._lingering = False
        self._discarded = 0
        self._keep_alive = True
        self.busy = False
        self.opened = self.touched = time.monotonic()
        self.on_gone: Callable[[], None] | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; its buffer counts from the first byte, to know when memory is free again."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._site.connections.add(self)

    def get_buffer(self, hint: int) -> memoryview:
        """Return where the next bytes go: into the arena when a large body is being received."""
        incoming = self._incoming
        if incoming is not None and incoming.view is not None and not self.busy:
            return incoming.view[incoming.received :]
        return memoryview(self._site.scratch)

    def buffer_updated(self, count: int) -> None:
        """Take in what arrived."""
        self.touched = time.monotonic()
        incoming = self._incoming
        if self._lingering:
            self._discarded += count
            if self._discarded > _MAX_LINGERING_BYTES:
                self.abort()
        elif incoming is not None and incoming.view is not None and not self.busy:
            incoming.received += count
            if incoming.received == incoming.length:
                self._dispatch(incoming)
        elif self._pending or self.busy:
            self._pending += memoryview(self._site.scratch)[:count]
            if not self.busy:
                self._consume_pending()
            elif len(self._pending) > _MAX_PENDING_BYTES and self._transport is not None and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        else:
            used = self._consume(self._site.scratch, count)
            if used < count:
                self._pending += memoryview(self._site.scratch)[used:count]

    def eof_received(self) -> bool:
        """Keep the way back open while an answer is due: a client may close its side after asking."""
        self._keep_alive = False
        return self.busy

    def resume_writing(self) -> None:
        """Everything is written: the memory of the answer is free."""
        self.touched = time.monotonic()
        self._release()

    def connection_lost(self, error: Exception | None) -> None:
        """Give everything back."""
        self._site.connections.discard(self)
        self._transport = None
        self._release()
        incoming = self._incoming
        if incoming is not None and not self.busy and incoming.slot is not None:
            self._site.arena.give_back(incoming.slot)
        self._incoming = None
        if self.on_gone is not None:
            self.on_gone()

    # --- the server's side

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer the request at hand; ``slot`` is given back when ``tail``, which lies in it, has been written."""
        self.on_gone = None
        transport = self._transport
        if transport is None or transport.is_closing():
            if slot is not None:
                self._site.arena.give_back(slot)
            return
        keep_alive = self._keep_alive and not self._site.draining
        length = len(body) + sum(map(len, tail or ()))
        head = write_head(status, content_type, length, keep_alive, extra)
        if self._incoming is not None and self._incoming.head.method == b"HEAD":
            body, tail = b"", None
        if slot is not None:
            self._unsent.append(slot)
        if tail:
            transport.writelines([head + body, *tail])
        else:
            transport.write(head + body)
        if not transport.get_write_buffer_size():
            self._release()
        self.touched = time.monotonic()
        self.busy = False
        self._incoming = None
        if not keep_alive:
            self._finish()
        elif self._pending:
            asyncio.get_running_loop().call_soon(self._consume_pending)

    def respond_json(self, status: int, document: object, extra: bytes = b"") -> None:
        """Answer with a JSON document."""
        self.respond(status, CONTENT_JSON, orjson.dumps(document), extra=extra)

    def refuse(self, refusal: RefusedError) -> None:
        """Answer with an error."""
        extra = b""
        if refusal.retry_after_s is not None:
            extra = b"Retry-After: %d\r\n" % max(1, round(refusal.retry_after_s))
        if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED:
            extra += b"Allow: GET, POST\r\n"
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            extra += b"WWW-Authenticate: Bearer\r\n"
        self.respond_json(refusal.status.value, {"error": refusal.message}, extra)

    def close(self) -> None:
        """Close the connection after what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been asked that is not answered."""
        return not self.busy and self._incoming is None and not self._pending and not self._unsent

    def owes_nothing(self, now: float) -> bool:
        """Whether closing takes nothing from the client; one that has just come is about to ask."""
        return self.is_idle and (self.touched > self.opened or now - self.opened > _ABOUT_TO_ASK_S)

    # --- reading

    def _consume_pending(self) -> None:
        if self.busy or self._lingering or self._transport is None:
            return
        pending, self._pending = self._pending, bytearray()
        used = self._consume(pending, len(pending))
        self._pending[:0] = memoryview(pending)[used:]
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _consume(self, buffer: bytearray, end: int) -> int:
        """Take requests out of ``buffer`` until one has to be waited for; return how far that is."""
        position = 0
        while position < end and not self.busy and not self._lingering:
            if self._incoming is not None:
                position = self._take_body(self._incoming, buffer, position, end)
                continue
            stop = buffer.find(b"\r\n\r\n", position, end)
            if stop < 0:
                if end - position > _MAX_HEAD_BYTES:
                    self._reject(RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long"))
                break
            stop += 4
            self._begin(bytes(memoryview(buffer)[position:stop]))
            position = stop
        return position

    def _begin(self, text: bytes) -> None:
        """Read a head and prepare for its body."""
        self.touched = time.monotonic()
        try:
            head = read_head(text)
        except RefusedError as refusal:
            self._reject(refusal)
            return
        self._keep_alive = head.keep_alive and not head.chunked
        incoming = self._incoming = _Incoming(head, _DISCARD, self.touched, head.length or 0, 0)
        try:
            self._prepare(incoming, text)
        except RefusedError as refusal:
            # A body that is not much too large is read, so that the connection can go on.
            if head.chunked or incoming.length > _MAX_DISCARDED_BYTES or b"expect" in head.headers:
                self._reject(refusal)
                return
            incoming.refusal = refusal
        if head.headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not incoming.length and incoming.chunks is None:
            self._dispatch(incoming)

    def _prepare(self, incoming: _Incoming, text: bytes) -> None:
        head = incoming.head
        incoming.route = self._site.route(head)
        if head.headers.get(b"content-encoding", b"identity") != b"identity":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not supported")
        if head.chunked:
            body = ChunkedBody(incoming.route.max_body)
            incoming.chunks = (chunk_parser(text, body), body)
            return
        if incoming.length > incoming.route.max_body:
            raise too_large(incoming.route.max_body)
        incoming.json_bytes = _json_length(head, incoming.length)
        if incoming.route.in_arena and incoming.length > INLINE_BYTES:
            self._reserve(incoming)

    def _reserve(self, incoming: _Incoming) -> None:
        """Take memory for a large body, placed so that the first tensor in it is aligned."""
        slot = self._site.arena.take(incoming.length + ALIGNMENT)
        if slot is None:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server has no memory left for this request", 1.0)
        incoming.slot = slot
        incoming.start = slot.offset + -incoming.json_bytes % ALIGNMENT
        incoming.view = self._site.arena.view(incoming.start, incoming.length)

    def _take_body(self, incoming: _Incoming, buffer: bytearray, position: int, end: int) -> int:
        if incoming.chunks is not None:
            return self._take_chunks(incoming, bytes(memoryview(buffer)[position:end])) + end
        count = min(end - position, incoming.length - incoming.received)
        piece = memoryview(buffer)[position : position + count]
        if incoming.view is not None:
            incoming.view[incoming.received : incoming.received + count] = piece
        elif incoming.refusal is None:
            incoming.data += piece
        incoming.received += count
        if incoming.received == incoming.length:
            self._dispatch(incoming)
        return position + count

    def _take_chunks(self, incoming: _Incoming, data: bytes) -> int:
        assert incoming.chunks is not None
        parser, body = incoming.chunks
        try:
            parser.feed_data(data)
        except RefusedError as refusal:
            self._reject(refusal)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._reject(cause if isinstance(cause, RefusedError) else bad_request(f"not HTTP: {error}"))
        else:
            if body.is_whole:
                incoming.data = body.data
                incoming.length = len(body.data)
                try:
                    incoming.json_bytes = _json_length(incoming.head, incoming.length)
                except RefusedError as refusal:
                    incoming.refusal = refusal
                self._dispatch(incoming)
        return 0

    def _dispatch(self, incoming: _Incoming) -> None:
        self.busy = True
        if incoming.refusal is not None:
            self.refuse(incoming.refusal)
            return
        if incoming.slot is None:
            body = Body(bytes(incoming.data), incoming.json_bytes)
        else:
            assert incoming.view is not None
            body = Body(incoming.view, incoming.json_bytes, incoming.start)
        incoming.view = None
        incoming.route.handle(self, incoming.head, ReceivedBody(body, incoming.slot, incoming.arrived))

    # --- writing and closing

    def _release(self) -> None:
        for slot in self._unsent:
            self._site.arena.give_back(slot)
        self._unsent = []

    def _reject(self, refusal: RefusedError) -> None:
        """Answer before the request was read, and close: what follows cannot be told apart from a request."""
        incoming = self._incoming
        if incoming is not None and incoming.slot is not None:
            self._site.arena.give_back(incoming.slot)
            incoming.slot = incoming.view = None
        self._keep_alive = False
        self.refuse(refusal)

    def _finish(self) -> None:
        """Close, but read on for a moment: closing with unread bytes would destroy the answer on its way."""
        if self._transport is None:
            return
        self._lingering = True
        self._pending.clear()
        if self._paused:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_S, self.close)
        else:
            self._transport.close()


def _json_length(head: HttpHead, length: int) -> int:
    text = head.headers.get(_JSON_LENGTH)
    if text is None:
        return length
    if not text.isdigit() or len(text) > 18 or int(text) > length:
        raise bad_request("Inference-Header-Content-Length must be a number and at most Content-Length")
    return int(text)


def _discard(connection: HttpConnection, head: HttpHead, received: ReceivedBody) -> None:
    raise AssertionError("a request without a route is refused before it is handled")


_DISCARD = Route(_discard)
