"""Receives the bodies of a connection's requests: large ones into the arena in their turn, others to be discarded."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Protocol

from gpuprof.serving.protocol.body_turns import TURN_BYTES, BodyTurns
from gpuprof.serving.protocol.client_progress import ClientProgress
from gpuprof.serving.protocol.incoming_request import IncomingRequest
from gpuprof.serving.protocol.loop_turns import DiscardTurns
from gpuprof.serving.protocol.unread_bytes import drop_unread, find_descriptor
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError

#: Discarded bodies are received in pieces of this size: large pieces halve the cost.
DISCARD_BYTES = 1 << 20
#: Where bytes can be dropped inside the kernel, a read takes only so many: it merely reports that more have come.
_PROBE_BYTES = 1 << 12
#: Where a large body is received, the system takes so many bytes of its connection before they are read. By itself it
#: begins with 64 KB and takes more as it sees more read at a time: the first large bodies of a connection would come in
#: a dozen pieces, with a wait for the client between them. Of a client that may not send one it takes no more.
_WINDOW_BYTES = 1 << 20


class BodyOwner(Protocol):
    """What the receivers of all connections share."""

    arena: Arena
    discard_buffer: bytearray
    bodies: BodyTurns
    discards: DiscardTurns


class BodyConnection(Protocol):
    """The connection of a `BodyReceiver`."""

    incoming: IncomingRequest | None
    progress: ClientProgress

    @property
    def is_open(self) -> bool:
        """Whether anything can still be received."""
        ...

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        ...

    def resume_reading(self) -> None:
        """Receive again."""
        ...

    def handle_request(self, incoming: IncomingRequest) -> None:
        """Handle the request, whose body is complete."""
        ...

    def reject(self, refusal: RefusedError) -> None:
        """Refuse the request, whose body is not complete, and close the connection."""
        ...


class BodyReceiver:
    """Receives the bodies of one connection; the `BodyReader` that waits for the turns of large ones."""

    def __init__(self, connection: BodyConnection, owner: BodyOwner) -> None:
        self._connection = connection
        self._owner = owner
        self._descriptor: int | None = None
        self._socket: socket.socket | None = None  #: Until its window is widened.
        self._awaits_turn = self._awaits_discard = False

    def open(self, transport: asyncio.BaseTransport) -> None:
        """Find out whether bytes of this transport can be dropped inside the kernel."""
        self._descriptor = find_descriptor(transport)
        self._socket = transport.get_extra_info("socket")

    @property
    def is_waiting(self) -> bool:
        """Whether the body waits for its turn to be received or discarded."""
        return self._awaits_turn or self._awaits_discard

    @property
    def awaits_turn(self) -> bool:
        """Whether the body waits for its turn to be received."""
        return self._awaits_turn

    def receive_buffer(self, incoming: IncomingRequest) -> memoryview | None:
        """Return where the next bytes of the body are received; None where they must be parsed first."""
        space = incoming.receive_buffer(self._owner.discard_buffer)
        if space is not None and self._descriptor is not None and incoming.is_discarded:
            return space[:_PROBE_BYTES]
        return space

    def is_received_directly(self, incoming: IncomingRequest) -> bool:
        """Return whether the body is received into a buffer of its own, and not parsed."""
        return incoming.receive_buffer(self._owner.discard_buffer) is not None

    def receive(self, incoming: IncomingRequest, count: int) -> None:
        """Record that ``count`` bytes have come into `receive_buffer`."""
        incoming.received += count
        if incoming.received == incoming.length:
            self._connection.handle_request(incoming)
        elif incoming.is_full:
            self._grow(incoming)
        elif incoming.is_discarded:
            self._discard_in_turn(incoming)
        elif incoming.received > TURN_BYTES:
            self.end_turn()

    def parse_body(self, incoming: IncomingRequest, buffer: bytearray, position: int, end: int) -> int:
        """Take the bytes of the body out of ``buffer``; return where they end."""
        try:
            used, is_complete = incoming.parse(buffer, position, end, self._owner.arena)
        except RefusedError as refusal:
            self._connection.reject(refusal)
            return end
        if is_complete:
            self._connection.handle_request(incoming)
        elif incoming.is_discarded and self.is_received_directly(incoming):
            self._discard_in_turn(incoming)
        elif incoming.view is not None:
            self._receive_in_turn(incoming)
        return used

    def end_turn(self) -> None:
        """Let the body of another connection be received."""
        self._owner.bodies.end(self)

    # --- the turns' side

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that have been received."""
        incoming = self._connection.incoming
        return 0 if incoming is None else incoming.received

    def take_body_turn(self) -> None:
        """Receive the rest of a large body."""
        self._end_wait()
        self._connection.resume_reading()

    def drop_if_late(self, waited_s: float) -> bool:
        """Refuse a large body whose answer would be late after this wait; return whether it is not received."""
        incoming = self._connection.incoming
        if incoming is None:
            return True
        try:
            if incoming.admit_after_wait(1000.0 * waited_s, self._owner.arena):
                return False
        except RefusedError as refusal:
            self._connection.reject(refusal)
        else:
            self._discard_in_turn(incoming)
        self._end_wait()
        return True

    def _receive_in_turn(self, incoming: IncomingRequest) -> None:
        """Receive the rest of a large body now or when it is its turn."""
        self._widen_window()
        lane, lifo_after_s = incoming.route.lane, incoming.lifo_after_s
        if not self._awaits_turn and not self._owner.bodies.begin(self, lane, lifo_after_s):
            self._awaits_turn = True
            self._connection.pause_reading()

    def _widen_window(self) -> None:
        """Have the system take `_WINDOW_BYTES` of the connection before they are read."""
        if self._socket is not None:
            with suppress(OSError):  # other systems than Linux may not let it be set
                # Unlike SO_RCVBUF this leaves it to Linux to widen the window further.
                for low in (_WINDOW_BYTES, 1):
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._socket = None

    def _end_wait(self) -> None:
        """Count the client's time from now on: until now the server has kept it waiting."""
        self._awaits_turn = False
        self._connection.progress.restart()

    def _discard_in_turn(self, incoming: IncomingRequest) -> None:
        """Receive more of a discarded body when it is its turn."""
        self.end_turn()
        if not self._awaits_discard:
            self._awaits_discard = True
            self._connection.pause_reading()
            size = min(incoming.length - incoming.received, DISCARD_BYTES)
            self._owner.discards.wait(self._discard_more, size)

    def _discard_more(self) -> None:
        """Drop the received bytes of a discarded body; those still to come wait for another turn."""
        self._awaits_discard = False
        incoming = self._connection.incoming
        if self._descriptor is not None and incoming is not None and incoming.is_discarded and self._connection.is_open:
            buffer = memoryview(self._owner.discard_buffer)[: incoming.length - incoming.received]
            if dropped := drop_unread(self._descriptor, buffer):
                self._connection.progress.receive()
                incoming.received += dropped
            if incoming.received == incoming.length:
                self._connection.handle_request(incoming)
        self._connection.resume_reading()

    def _grow(self, incoming: IncomingRequest) -> None:
        try:
            incoming.grow(self._owner.arena)
        except RefusedError as refusal:
            self._connection.reject(refusal)
