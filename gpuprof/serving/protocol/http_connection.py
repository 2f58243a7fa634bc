"""One HTTP/1.1 connection: large bodies are received straight into the arena and large answers sent from it.

A framework would copy every tensor several times on its way; at half a megabyte a request that is most of the cost
of serving. So heads are parsed by httptools and bodies are read where they are needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Protocol, cast

import orjson

from gpuprof.serving.protocol.body_turns import TURN_BYTES, BodyTurns
from gpuprof.serving.protocol.connection_set import ConnectionSet
from gpuprof.serving.protocol.http_incoming import MAX_DISCARDED_BYTES, Incoming, KnownHead, ReceivedBody, Route
from gpuprof.serving.protocol.http_message import CONTENT_JSON, HttpHead, read_head, write_head
from gpuprof.serving.protocol.loop_turns import DiscardTurns, LoopTurns
from gpuprof.serving.protocol.peer_counts import find_client
from gpuprof.serving.protocol.unread_bytes import drop_unread, find_descriptor
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

SCRATCH_BYTES = 1 << 16
#: Bodies that are discarded are received into so much: in large pieces that costs half.
WASTE_BYTES = 1 << 20
#: Of a body that is dropped unread so much is read each time.
_PROBE_BYTES = 1 << 12
_MAX_HEAD_BYTES = 1 << 15
#: Of requests sent ahead (pipelining) or that wait for their turn: beyond it nothing more is read from the connection.
_MAX_PENDING_BYTES = 1 << 15
#: Of a chunked body: a chunk of a byte takes six, so that these are more than a thousand, half a millisecond's work.
_CHUNKED_BYTES = 1 << 13
#: RFC 9112, 9.6: after its last answer a server half-closes and reads on for a while, or a reset destroys the answer.
_LINGER_S = 2.0
#: A connection without a request may have one on its way when the server drains.
_NEW_CONNECTION_S = 1.0
_MAX_LINGERING_BYTES = 1 << 24
_MAX_UNSENT_BYTES = 1 << 16
#: An answer of up to so many bytes is written in one piece: copying it costs less than another buffer.
_MAX_JOINED_BYTES = 1 << 12
_TOO_MANY_CONNECTIONS = write_head(429, CONTENT_JSON, 0, keep_alive=False, extra=b"Retry-After: 1\r\n")
#: Who sends or reads more slowly than that, all in all, stands still.
_LEAST_BYTES_PER_S = 1 << 17


class ConnectionOwner(Protocol):
    """What connections share."""

    arena: Arena
    scratch: bytearray
    waste: bytearray
    connections: ConnectionSet[HttpConnection]
    turns: LoopTurns
    bodies: BodyTurns
    discards: DiscardTurns
    known_heads: dict[bytes, KnownHead]

    @property
    def draining(self) -> bool:
        """Whether connections are to be closed after their answer."""
        ...

    def count_refusal(self, refusal: RefusedError) -> None:
        """Count an answer that says no."""
        ...

    def lane(self, beginning: Buffer) -> Hashable:
        """Return with whom a request that begins so shares its part of the router; None: with others of its client."""
        ...

    def route(self, head: HttpHead) -> Route:
        """Return what answers this request.

        Raises
        ------
        RefusedError
            404, 405, …
        """
        ...


class HttpConnection(asyncio.BufferedProtocol):
    """Reads requests one after another and writes their answers."""

    def __init__(self, site: ConnectionOwner) -> None:
        self._site = site
        self.peer = ""
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._incoming: Incoming | None = None
        self._unsent: list[Slot] = []
        self._paused = False
        self._is_write_blocked = False
        self._lingering = False
        self._awaits_turn = self._awaits_body = self._awaits_discard = False
        self._client_ended = False
        self._waits_since: float | None = None
        self._began: float | None = None
        self._unsent_bytes = 0
        self._discarded = 0
        self._descriptor: int | None = None
        self._keep_alive = True
        self.busy = False
        self.opened = self.touched = time.monotonic()
        self.on_disconnect: Callable[[], None] | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; its buffer counts from the first byte, to know when memory is free again."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._descriptor = find_descriptor(transport)
        self.peer = find_client(str((transport.get_extra_info("peername") or ("",))[0]))
        if not self._site.connections.add(self):
            self._transport.write(_TOO_MANY_CONNECTIONS)
            self._transport.close()

    def get_buffer(self, hint: int) -> memoryview:
        """Return where the next bytes go: into the arena when a large body is being received."""
        incoming = self._incoming
        space = None if incoming is None or self.busy else incoming.space(self._site.waste)
        if incoming is None or space is None:
            return memoryview(self._site.scratch)
        # Where the rest can be dropped unread, it is read only to hear that it has come.
        return space[:_PROBE_BYTES] if self._descriptor is not None and incoming.is_discarded else space

    def buffer_updated(self, count: int) -> None:
        """Take in what arrived."""
        self.touched = time.monotonic()
        if self._began is None:
            self._began = self.touched
        incoming = self._incoming
        if self._lingering:
            self._discarded += count
            if self._discarded > _MAX_LINGERING_BYTES:
                self.abort()
        elif incoming is not None and not self.busy and incoming.space(self._site.waste) is not None:
            incoming.received += count
            if incoming.received == incoming.length:
                self._dispatch(incoming)
            elif incoming.is_full:
                self._grow(incoming)
            elif incoming.is_discarded:
                self._discard_in_turn(incoming)
            elif incoming.received > TURN_BYTES:
                self._site.bodies.end(self)
        elif (
            self._pending
            or self.busy
            or self._is_write_blocked
            or not self._has_turn(memoryview(self._site.scratch)[:count])
        ):
            self._pending += memoryview(self._site.scratch)[:count]
            if not self.busy and not self._is_write_blocked and not self._awaits_turn:
                self._consume_pending()
            elif len(self._pending) > _MAX_PENDING_BYTES:
                self._pause()
        else:
            used = self._consume(self._site.scratch, count)
            if used < count:
                self._pending += memoryview(self._site.scratch)[used:count]

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def _discard_in_turn(self, incoming: Incoming) -> None:
        """Receive more of a body that is discarded when it is its turn."""
        self._site.bodies.end(self)
        if not self._awaits_discard:
            self._awaits_discard = True
            self._pause()
            self._site.discards.wait(self._discard_more, min(incoming.length - incoming.received, WASTE_BYTES))

    def _discard_more(self) -> None:
        """Discard what has come of a body; what is still to come has its turn after its first piece."""
        self._awaits_discard = False
        incoming, transport = self._incoming, self._transport
        is_open = transport is not None and not transport.is_closing()
        if self._descriptor is not None and incoming is not None and incoming.is_discarded and is_open:
            room = memoryview(self._site.waste)[: incoming.length - incoming.received]
            if dropped := drop_unread(self._descriptor, room):
                self.touched = time.monotonic()
                incoming.received += dropped
            if incoming.received == incoming.length:
                self._dispatch(incoming)
        self._resume()

    def _receive_in_turn(self, incoming: Incoming) -> None:
        """Receive the rest of a large body now or when it is its turn."""
        if not self._awaits_body and not self._site.bodies.begin(self, incoming.route.lane, incoming.lifo_after_s):
            self._awaits_body = True
            self._pause()

    def take_body_turn(self) -> None:
        """Receive the rest of a large body."""
        self._end_body_wait()
        self._resume()

    def _end_body_wait(self) -> None:
        """Count the client's time from now on: for what was before, the router kept it waiting."""
        self._awaits_body = False
        self.touched = self._began = time.monotonic()

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that have come."""
        return 0 if self._incoming is None else self._incoming.received

    def drop_if_late(self, waited_s: float) -> bool:
        """Return whether a large body is not to be received: its answer would be late, or nobody waits for it."""
        incoming = self._incoming
        if incoming is None or self._transport is None:
            return True
        try:
            if incoming.is_still_wanted(1000.0 * waited_s, self._site.arena):
                return False
        except RefusedError as refusal:
            self._reject(refusal)
        else:
            self._discard_in_turn(incoming)
        self._end_body_wait()
        return True

    def _has_turn(self, beginning: memoryview) -> bool:
        """Return whether a new request that begins so may be read now, or goes on; chunks may be small and many."""
        turns, now, incoming = self._site.turns, self.touched, self._incoming
        if (incoming is not None and not incoming.head.chunked) or turns.admits_all(now):
            return True
        if incoming is None:
            lane: Hashable = self._site.lane(beginning) or self.peer
        else:
            lane = self.peer, incoming.route.lane
        if turns.admits(lane, now):
            return True
        self._awaits_turn, self._waits_since = True, turns.arrival(now)
        turns.wait(lane, self._take_turn)
        return False

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self._consume_pending(has_turn=True)
        if not self._awaits_turn:
            self._waits_since = None

    def eof_received(self) -> bool:
        """Keep the way back open while an answer is due: a client may close its side after asking."""
        self._client_ended = True
        self._keep_alive = self._keep_alive and bool(self._pending)
        return self.busy or self._awaits_turn or self._is_write_blocked

    def resume_writing(self) -> None:
        """Everything is written: the memory of the answer is free."""
        self.touched = time.monotonic()
        self._release()
        if self._is_write_blocked:
            self._is_write_blocked = False
            self._consume_pending()

    def connection_lost(self, error: Exception | None) -> None:
        """Give everything back."""
        self._site.connections.discard(self)
        self._site.bodies.end(self)
        self._transport = None
        self._release()
        incoming = self._incoming
        if incoming is not None:
            incoming.release(self._site.arena)
        self._incoming = None
        if self.on_disconnect is not None:
            self.on_disconnect()

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
        self.on_disconnect = None
        transport = self._transport
        if transport is None or transport.is_closing():
            if slot is not None:
                self._site.arena.give_back(slot)
            return
        keep_alive = self._keep_alive and not self._site.draining
        length = len(body) + sum(map(len, tail)) if tail else len(body)
        head = write_head(status, content_type, length, keep_alive, extra)
        if self._incoming is not None and self._incoming.head.method == b"HEAD":
            body, tail = b"", None
        if slot is not None:
            self._unsent.append(slot)
        if tail and length > _MAX_JOINED_BYTES:
            transport.writelines([head + body, *tail])
        elif tail:
            transport.write(b"".join((head, body, *tail)))
        else:
            transport.write(head + body)
        self._unsent_bytes = transport.get_write_buffer_size()
        if self._unsent and not self._unsent_bytes:
            self._release()
        self._is_write_blocked = self._unsent_bytes > _MAX_UNSENT_BYTES
        self.touched = time.monotonic()
        self._began = self.touched if self._pending or self._unsent_bytes else None
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
        if refusal.allowed:
            extra += b"Allow: %s\r\n" % refusal.allowed.encode()
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            extra += b"WWW-Authenticate: Bearer\r\n"
        self._site.count_refusal(refusal)
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
        return not (self.busy or self._incoming or self._pending or self._unsent or self._is_write_blocked)

    def is_overdue(self, now: float, stall_s: float) -> bool:
        """Whether a client stands still, or its request, from its first byte, or its reading has taken too long.

        Parameters
        ----------
        now, stall_s : float
            Monotonic seconds; how long it may take beyond what its bytes take slowly.
        """
        if self.busy or self._awaits_body or self.is_idle:
            return False
        if self._began is None or now - self.touched > stall_s:
            return now - self.touched > stall_s
        length = self._unsent_bytes if self._incoming is None else self._incoming.length
        return now - self._began > stall_s + length / _LEAST_BYTES_PER_S

    def can_close(self, now: float) -> bool:
        """Whether closing takes nothing from the client; one that has just come is about to ask."""
        return self.is_idle and (self.touched > self.opened or now - self.opened > _NEW_CONNECTION_S)

    # --- reading

    def _consume_pending(self, has_turn: bool = False) -> None:
        if self.busy or self._is_write_blocked or self._lingering or self._awaits_turn or self._transport is None:
            return
        if self._pending and not has_turn and not self._has_turn(memoryview(self._pending)):
            return
        pending, self._pending = self._pending, bytearray()
        used = self._consume(pending, len(pending))
        self._pending[:0] = memoryview(pending)[used:]
        if self._client_ended and not (self.busy or self._is_write_blocked or self._lingering or self._awaits_turn):
            self.close()  # the rest of what it began to ask will not come
            return
        has_room = not self._awaits_turn or len(self._pending) <= _MAX_PENDING_BYTES
        if has_room and not (self._awaits_body or self._awaits_discard):
            self._resume()

    def _consume(self, buffer: bytearray, end: int) -> int:
        """Take requests out of ``buffer`` until one has to be waited for; return how far that is."""
        position = 0
        while position < end and not (self.busy or self._is_write_blocked or self._lingering):
            # Requests that are answered at once may stand here by the thousand.
            if position and not self._has_turn(memoryview(buffer)[position:end]):
                break
            if self._incoming is not None:
                stop = min(end, position + _CHUNKED_BYTES) if self._incoming.head.chunked else end
                position = self._take_body(self._incoming, buffer, position, stop)
                continue
            stop = buffer.find(b"\r\n\r\n", position, end)
            if stop < 0:
                if end - position > _MAX_HEAD_BYTES:
                    self._reject(RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long"))
                break
            stop += 4
            text = bytes(memoryview(buffer)[position:stop])
            known = self._site.known_heads.get(text)
            if known is not None and stop + known.length <= end:
                position = stop + known.length
                self._handle_known(known, bytes(memoryview(buffer)[stop:position]), is_last=position == end)
                continue
            self._begin(text, end - stop)
            position = stop
        return position

    def _handle_known(self, known: KnownHead, body: bytes, is_last: bool) -> None:
        """Handle a request that is here as a whole, and whose head came before: most small ones are."""
        self.touched = time.monotonic()
        arrived, self._waits_since = self._waits_since or self._site.turns.arrival(self.touched), None
        self._keep_alive = known.head.keep_alive and not (self._client_ended and is_last)
        self.busy = True
        known.route.handle(self, known.head, ReceivedBody(RequestBody(body, known.json_bytes), None, arrived))

    def _begin(self, text: bytes, more: int) -> None:
        """Read a head, behind which so many bytes are there already, and prepare for its body."""
        self.touched = time.monotonic()
        arrived, self._waits_since = self._waits_since or self._site.turns.arrival(self.touched), None
        try:
            head = read_head(text)
        except RefusedError as refusal:
            self._reject(refusal)
            return
        # The parser of chunks is given all that came, with what may stand behind the last: no request may follow.
        is_last = self._client_ended and more <= (head.length or 0)
        self._keep_alive = head.keep_alive and not head.chunked and not is_last
        incoming = self._incoming = Incoming.begin(head, arrived, self.peer)
        try:
            incoming.prepare(self._site.route(head))
        except RefusedError as refusal:
            # A body that is not much too large is read, so that the connection can go on.
            if head.chunked or incoming.length > MAX_DISCARDED_BYTES or b"expect" in head.headers:
                self._reject(refusal)
                return
            incoming.refusal = refusal
        else:
            incoming.remember_head(text, self._site.known_heads)
        if head.headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            # RFC 9110, 10.1.1: the client waits for this before it sends the body.
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if incoming.is_whole:
            self._dispatch(incoming)

    def _take_body(self, incoming: Incoming, buffer: bytearray, position: int, end: int) -> int:
        try:
            used, whole = incoming.take(buffer, position, end, self._site.arena)
        except RefusedError as refusal:
            self._reject(refusal)
            return end
        if whole:
            self._dispatch(incoming)
        elif incoming.is_discarded and incoming.space(self._site.waste) is not None:
            self._discard_in_turn(incoming)
        elif incoming.view is not None:
            self._receive_in_turn(incoming)
        return used

    def _grow(self, incoming: Incoming) -> None:
        try:
            incoming.grow(self._site.arena)
        except RefusedError as refusal:
            self._reject(refusal)

    def _dispatch(self, incoming: Incoming) -> None:
        self._site.bodies.end(self)
        self.busy = True
        if incoming.refusal is not None:
            self.refuse(incoming.refusal)
            return
        incoming.route.handle(self, incoming.head, incoming.body())

    # --- writing and closing

    def _release(self) -> None:
        for slot in self._unsent:
            self._site.arena.give_back(slot)
        self._unsent = []

    def _reject(self, refusal: RefusedError) -> None:
        """Answer before the request was read, and close: what follows cannot be told apart from a request."""
        if self._incoming is not None:
            self._incoming.release(self._site.arena)
        self._site.bodies.end(self)
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
