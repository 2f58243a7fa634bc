"""One HTTP/1.1 connection: large bodies are received straight into the arena and large answers sent from it.

A framework would copy every tensor several times on its way; at half a megabyte a request that is most of the cost
of serving. So heads are parsed by httptools and bodies are read where they are needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import cast

import orjson

from gpuprof.serving.protocol.answer_writer import AnswerWriter
from gpuprof.serving.protocol.body_receiver import BodyReceiver
from gpuprof.serving.protocol.client_progress import ClientProgress
from gpuprof.serving.protocol.connection_owner import ConnectionOwner
from gpuprof.serving.protocol.http_message import CONTENT_JSON, read_head, refusal_headers, write_head
from gpuprof.serving.protocol.http_route import MAX_DISCARDED_BYTES, ReceivedBody
from gpuprof.serving.protocol.incoming_request import IncomingRequest, KnownHead
from gpuprof.serving.protocol.peer_counts import find_client
from gpuprof.serving.protocol.record_turns import RecordReader
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

SCRATCH_BYTES = 1 << 16
#: What is read before a head is known: more of a large body would be copied once more.
_FIRST_BYTES = 1 << 14
_MAX_HEAD_BYTES = 1 << 15
#: Bytes of pipelined requests and of requests that wait for their turn; beyond it the connection is not read.
_MAX_PENDING_BYTES = 1 << 15
#: Bytes of a chunked body that are parsed in a turn: chunks of one byte take six, so these are more than a thousand
#: chunks, half a millisecond's work.
_CHUNKED_BYTES = 1 << 13
#: RFC 9112, 9.6: after its last answer a server half-closes and reads on for a while, or a reset destroys the answer.
_LINGER_S = 2.0
#: A connection this young may have its first request on the way when the server drains.
_NEW_CONNECTION_S = 1.0
_MAX_LINGERING_BYTES = 1 << 24
_TOO_MANY_CONNECTIONS = write_head(429, CONTENT_JSON, 0, keep_alive=False, extra=b"Retry-After: 1\r\n")


class HttpConnection(asyncio.BufferedProtocol):
    """Reads requests one after another and writes their answers."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self.peer = ""
        self.incoming: IncomingRequest | None = None
        self.progress = ClientProgress()
        self.busy = False
        self.on_disconnect: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._records: RecordReader | None = None  #: Of TLS.
        self._body = BodyReceiver(self, owner)
        self._answers = AnswerWriter(owner.arena)
        self._pending = bytearray()
        self._is_paused = False
        self._awaits_turn = False
        self._waits_since: float | None = None
        self._client_ended = False
        self._keep_alive = True
        self._lingering = False
        self._lingering_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, unless there are too many connections."""
        self._transport = cast(asyncio.Transport, transport)
        self._answers.open(self._transport)
        self._body.open(transport)
        self.peer = find_client(str((transport.get_extra_info("peername") or ("",))[0]))
        if transport.get_extra_info("ssl_object") is not None:
            self._records = RecordReader(self._owner.records, self.peer, self._end_wait)
        if not self._owner.connections.add(self, self.progress.opened):
            self._transport.write(_TOO_MANY_CONNECTIONS)
            self._transport.close()

    def get_buffer(self, hint: int) -> memoryview:
        """Return where the next bytes go: into the arena when a large body is being received."""
        space = self._find_space()
        return space if self._records is None else self._records.limit(space)

    def _find_space(self) -> memoryview:
        scratch = memoryview(self._owner.scratch)
        if self.incoming is None and not self._lingering:
            return scratch[:_FIRST_BYTES]
        space = None if self.incoming is None or self.busy else self._body.receive_buffer(self.incoming)
        return scratch if space is None else space

    def buffer_updated(self, count: int) -> None:
        """Handle received bytes."""
        if self._records is not None and self._records.count(count) and self._transport is not None:
            self._transport.pause_reading()
        self.progress.receive()
        incoming = self.incoming
        if self._lingering:
            self._lingering_bytes += count
            if self._lingering_bytes > _MAX_LINGERING_BYTES:
                self.abort()
        elif incoming is not None and not self.busy and self._body.is_received_directly(incoming):
            self._body.receive(incoming, count)
        else:
            self._receive_text(memoryview(self._owner.scratch)[:count])

    def _receive_text(self, received: memoryview) -> None:
        """Parse received bytes, or keep them until they may be parsed."""
        if self._pending or not self._can_read or not self._has_turn(received):
            self._pending += received
            if self._can_read:
                self._consume_pending()
            elif len(self._pending) > _MAX_PENDING_BYTES or len(received) == _FIRST_BYTES:
                self.pause_reading()
            return
        used = self._consume(self._owner.scratch, len(received))
        if used < len(received):
            self._pending += received[used:]

    def eof_received(self) -> bool:
        """Keep the connection open for writing while an answer is due: a client may half-close after its request."""
        self._client_ended = True
        self._keep_alive = self._keep_alive and bool(self._pending)
        return self.busy or self._awaits_turn or self._answers.is_blocked

    def resume_writing(self) -> None:
        """Free the memory of answers: everything is sent."""
        was_blocked = self._answers.is_blocked
        self._answers.finish()
        self.progress.send(is_last=self.incoming is None and not self._pending)
        if was_blocked:
            self._consume_pending()

    def connection_lost(self, error: Exception | None) -> None:
        """Free everything."""
        self._owner.connections.discard(self)
        self._body.end_turn()
        self._transport = None
        self._answers.release()
        if self.incoming is not None:
            self.incoming.release(self._owner.arena)
        self.incoming = None
        if self.on_disconnect is not None:
            self.on_disconnect()

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer the current request; ``slot``, in which ``tail`` lies, is given back when that is sent."""
        self.on_disconnect = None
        tail = tail or []
        if not self.is_open:
            if slot is not None:
                self._owner.arena.give_back(slot)
            return
        keep_alive = self._keep_alive and not self._owner.draining
        length = len(body) + sum(map(len, tail)) if tail else len(body)
        head = write_head(status, content_type, length, keep_alive, extra)
        if self.incoming is not None and self.incoming.head.method == b"HEAD":
            body, tail = b"", []
        self._answers.write(head, body, tail, slot)
        self.progress.answer(is_under_way=bool(self._pending or self._answers.unsent_bytes))
        self.busy = False
        self.incoming = None
        if not keep_alive:
            self._linger()
        elif self._pending:
            asyncio.get_running_loop().call_soon(self._consume_pending)

    def respond_json(self, status: int, document: object, extra: bytes = b"") -> None:
        """Answer with a JSON document."""
        self.respond(status, CONTENT_JSON, orjson.dumps(document), extra=extra)

    def refuse(self, refusal: RefusedError) -> None:
        """Answer with an error."""
        self._owner.count_refusal(refusal)
        self.respond_json(refusal.status.value, {"error": refusal.message}, refusal_headers(refusal))

    def close(self) -> None:
        """Close the connection when everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether the connection is neither closed nor closing."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Whether every request is answered, and every answer sent."""
        return not (self.busy or self.incoming or self._pending) and self._answers.is_idle

    def is_overdue(self, now: float, stall_s: float) -> bool:
        """Return whether a request or answer has not moved for ``stall_s``, or takes as much longer than its bytes."""
        if self.busy or self._body.awaits_turn or self.is_idle:
            return False
        length = self._answers.unsent_bytes if self.incoming is None else self.incoming.length
        return self.progress.is_overdue(now, stall_s, length)

    @property
    def touched(self) -> float:
        """When bytes last moved: monotonic seconds."""
        return self.progress.touched

    def is_idle_at(self, now: float) -> bool:
        """Return whether the client has asked nothing for a while, or has not gone on with a request."""
        return not self._is_served and self.progress.is_quiet(now, is_asked=not self.is_idle)

    def is_unfinished_at(self, now: float) -> bool:
        """Return whether the client has begun a request a while ago of which more is to come."""
        return not (self._is_served or self.is_idle) and self.progress.has_lasted(now)

    @property
    def _is_served(self) -> bool:
        """Whether it is the server that a request waits for, or an answer that is being sent."""
        return self.busy or self._awaits_turn or self._body.awaits_turn or not self._answers.is_idle

    def can_close(self, now: float) -> bool:
        """Return whether closing loses nothing; a client that has just connected may be about to send a request."""
        opened = self.progress.opened
        return self.is_idle and (self.progress.touched > opened or now - opened > _NEW_CONNECTION_S)

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            if self._records is None or not self._records.is_waiting:
                self._transport.resume_reading()

    def _end_wait(self) -> None:
        """Receive again, unless something else is waited for."""
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def _can_read(self) -> bool:  # the last is answered, its answer nearly sent, and no turn awaited
        return not (self.busy or self._awaits_turn or self._lingering or self._answers.is_blocked)

    def _has_turn(self, beginning: memoryview) -> bool:
        """Return whether the request that begins so may be read now; else it waits for its turn.

        The rest of a request needs no turn, but that of a chunked body does: its chunks may be small and many.
        """
        turns, now, incoming = self._owner.turns, self.progress.touched, self.incoming
        if (incoming is not None and not incoming.head.chunked) or turns.admits_all(now):
            return True
        if incoming is None:
            lane: Hashable = self._owner.find_lane(beginning) or self.peer
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

    def _consume_pending(self, has_turn: bool = False) -> None:
        """Read the requests among the pending bytes."""
        if not self._can_read or self._transport is None:
            return
        if self._pending and not has_turn and not self._has_turn(memoryview(self._pending)):
            return
        pending, self._pending = self._pending, bytearray()
        used = self._consume(pending, len(pending))
        self._pending[:0] = memoryview(pending)[used:]
        if self._client_ended and self._can_read:
            self.close()  # the rest of an incomplete request will not come
            return
        has_room = not self._awaits_turn or len(self._pending) <= _MAX_PENDING_BYTES
        if has_room and not self._body.is_waiting:
            self.resume_reading()

    def _consume(self, buffer: bytearray, end: int) -> int:
        """Read requests out of ``buffer`` until one has to be waited for; return where the rest begins."""
        position = 0
        while position < end and not (self.busy or self._lingering or self._answers.is_blocked):
            # Thousands of requests that are answered at once may be pipelined here.
            if position and not self._has_turn(memoryview(buffer)[position:end]):
                break
            if self.incoming is not None:
                stop = min(end, position + _CHUNKED_BYTES) if self.incoming.head.chunked else end
                position = self._body.parse_body(self.incoming, buffer, position, stop)
                continue
            stop = buffer.find(b"\r\n\r\n", position, end)
            if stop < 0:
                if end - position > _MAX_HEAD_BYTES:
                    self.reject(RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long"))
                break
            stop += 4
            text = bytes(memoryview(buffer)[position:stop])
            known = self._owner.known_heads.get(text)
            if known is not None and stop + known.length <= end:
                position = stop + known.length
                self._handle_known(known, bytes(memoryview(buffer)[stop:position]), is_last=position == end)
                continue
            self._begin_request(text, end - stop)
            position = stop
        return position

    def _handle_known(self, known: KnownHead, body: bytes, is_last: bool) -> None:
        """Handle a complete request with a cached head: most small ones are."""
        arrived = self._read_arrival()
        self._keep_alive = known.head.keep_alive and not (self._client_ended and is_last)
        self.busy = True
        known.route.handle(self, known.head, ReceivedBody(RequestBody(body, known.json_bytes), None, arrived))

    def _read_arrival(self) -> float:
        """Return when the request that is read now arrived: before it waited for its turn."""
        self.progress.touched = now = time.monotonic()
        since, self._waits_since = self._waits_since, None
        return since or self._owner.turns.arrival(now)

    def _begin_request(self, text: bytes, more: int) -> None:
        """Parse a head, behind which ``more`` bytes have been received, and prepare to receive the body."""
        has_waited = self._waits_since is not None
        arrived = self._read_arrival()
        try:
            head = read_head(text)
        except RefusedError as refusal:
            self.reject(refusal)
            return
        # The chunk parser is given all that came, with what may stand behind the last chunk: no request may follow.
        is_last = self._client_ended and more <= (head.length or 0)
        self._keep_alive = head.keep_alive and not head.chunked and not is_last
        waited_ms = 1000.0 * (self.progress.touched - arrived) if has_waited else 0.0
        incoming = self.incoming = IncomingRequest.begin(head, arrived, self.peer, waited_ms)
        try:
            incoming.set_route(self._owner.find_route(head))
        except RefusedError as refusal:
            # A small body of a refused request is discarded, so that the connection can be kept.
            if head.chunked or incoming.length > MAX_DISCARDED_BYTES or b"expect" in head.headers:
                self.reject(refusal)
                return
            incoming.refusal = refusal
        else:
            incoming.remember_head(text, self._owner.known_heads)
        if head.headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            # RFC 9110, 10.1.1: the client waits for this before it sends the body.
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if incoming.is_complete:
            self.handle_request(incoming)

    def handle_request(self, incoming: IncomingRequest) -> None:
        """Handle a request whose body is complete."""
        self._body.end_turn()
        self.busy = True
        if incoming.refusal is not None:
            self.refuse(incoming.refusal)
            return
        incoming.route.handle(self, incoming.head, incoming.take_body())

    def reject(self, refusal: RefusedError) -> None:
        """Answer before the request is complete, and close: the next request could not be told from its rest."""
        if self.incoming is not None:
            self.incoming.release(self._owner.arena)
        self._body.end_turn()
        self._keep_alive = False
        self.refuse(refusal)

    def _linger(self) -> None:
        """Half-close, and read on for a while: closing with unread bytes would destroy the answer on its way."""
        if self._transport is None:
            return
        self._lingering = True
        self._pending.clear()
        if self._is_paused:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_S, self.close)
        else:
            self._transport.close()
