"""One connection of a gRPC client, relayed to grpcio over a Unix socket.

grpcio (1.85) holds the heads of calls to a size only once the client has acknowledged the server's settings, which an
attacker never does: 70 bytes are then kept for each byte of up to half a million fields a head. So the relay
acknowledges them for the client, as soon as grpcio has sent them, and leaves the client's own acknowledgement out. No
setting of this server takes away what a client may do before it knows them, but heads that are too long and calls
beyond the number for a connection, which would be refused a moment later.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

from gpuprof.serving.protocol.call_turns import CallTurns
from gpuprof.serving.protocol.client_account import ClientAccount, ConnectionAccount
from gpuprof.serving.protocol.http2_frames import ClientFrames, FrameError, ServerFrames
from gpuprof.serving.protocol.pending_connection import AGAIN, RECORD_BYTES, PendingConnection
from gpuprof.serving.protocol.poller import Poller

#: So much is read at once.
PIECE_BYTES = 1 << 16
#: In one direction of a connection, before others have their turn; and records of TLS in one of them, each of which
#: takes microseconds, though it were a byte.
_PIECES, _RECORDS = 4, 16
#: For the client to close when it has been told everything: what it still sends would else have the system reset the
#: connection, and take from it what it has not read yet.
_LINGER_S = 1.0
#: Where there are too many, a client makes room that has had no call for so long, or has for so long neither gone on
#: with a request nor read more of an answer.
_IDLE_S, _HALTED_S = 5.0, 30.0
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_NOTHING = memoryview(b"")


class RelayedConnection:
    """Passes bytes on in both directions, one piece at a time, and reads no more while one waits to be taken.

    Parameters
    ----------
    poller : Poller
    buffer : memoryview
        Of `PIECE_BYTES`, for what is being read; between two calls it holds nothing.
    pending : PendingConnection
        The client, which has sent the preface and its settings.
    upstream : socket
        The connection to grpcio.
    account : ClientAccount
        Of all connections of its client.
    turns : CallTurns
        In which calls begin.
    forget : callable
        Told when the connection is closed.

    Attributes
    ----------
    peer : str
        Whose connections are counted together.
    touched : float
        When a part of a call last came, from either side, to a tick; monotonic seconds.
    """

    __slots__ = (
        "_account",
        "_answers",
        "_begin",
        "_blocked_since",
        "_buffer",
        "_carried",
        "_client",
        "_down",
        "_forget",
        "_frames",
        "_is_client_ended",
        "_is_discarding",
        "_is_paused",
        "_lingers_until",
        "_poller",
        "_turns",
        "_up",
        "_upstream",
        "_watched",
        "peer",
        "touched",
    )

    def __init__(
        self,
        poller: Poller,
        buffer: memoryview,
        pending: PendingConnection,
        upstream: socket.socket,
        account: ClientAccount,
        turns: CallTurns,
        forget: Callable[[RelayedConnection], None],
    ) -> None:
        self._poller, self._buffer, self._turns, self._forget = poller, buffer, turns, forget
        self._account = ConnectionAccount(account, time.monotonic())
        self._client, self._upstream, self.peer = pending.client, upstream, pending.peer
        #: Until grpcio has sent its settings nothing is sent to it.
        self._begin, self._carried, self._frames = pending.begin, pending.carried, ClientFrames()
        self._answers = ServerFrames(self._frames.calls)
        #: What could not be passed on yet, to grpcio and to the client.
        self._up = self._down = _NOTHING
        self._is_client_ended = self._is_discarding = self._is_paused = False
        self._blocked_since = self.touched = time.monotonic()
        self._lingers_until = 0.0
        self._watched = [0, 0]
        self._watch()

    def check(self, now: float, stall_s: float) -> None:
        """Go on where that is a matter of time; close it when its client has not read for ``stall_s``."""
        calls = self._frames.calls
        if calls.has_moved:
            calls.has_moved, self.touched = False, now
        if self._is_paused and self._account.may_send(now):
            self._is_paused = False
            self._watch()
        if self._lingers_until:
            if now > self._lingers_until:
                self.abort()
        elif not self._down:
            self._blocked_since = now
        elif now > self._blocked_since + stall_s:
            self.abort()

    def is_idle_at(self, now: float) -> bool:
        """Return whether the server owes no answer that the client would read, and no call has gone on for a while.

        Pings and other frames that are of no call keep no connection from being idle.
        """
        calls = self._frames.calls
        if calls.is_computing and not self._down:
            return False
        return not calls.has_moved and now - self.touched > (_HALTED_S if calls else _IDLE_S)

    def is_unfinished_at(self, now: float) -> bool:
        """Return False: calls of a client are counted by themselves."""
        return False

    def abort(self) -> None:
        """Close both ends."""
        if self._client.fileno() < 0:
            return
        self._up = self._down = _NOTHING
        for end in (self._client, self._upstream):
            self._poller.unwatch(end)
            end.close()
        self._turns.forget(self)
        self._account.close()
        self._forget(self)

    def take_turn(self, room: int) -> None:
        """Begin so many of the calls that have come."""
        try:
            self._pass_carried(room)
            self._watch()
        except (OSError, FrameError):
            self.abort()

    def _on_client(self, events: int) -> None:
        if (self._is_paused or self._frames.lacks_room) and events & ~(_IN | _OUT):
            self.abort()  # nobody waits for what it has sent and is not read yet
            return
        try:
            if self._down and events & ~_IN:
                self._send_down()
            if self._watched[0] & _IN and events & ~_OUT:
                self._receive_up()
            self._watch()
        except (OSError, FrameError):
            self.abort()

    def _on_upstream(self, events: int) -> None:
        try:
            if self._up and events & ~_IN:
                self._send_up()
            if self._watched[1] & _IN and events & ~_OUT:
                self._receive_down()
            self._watch()
        except (OSError, FrameError):
            self.abort()

    def _watch(self) -> None:
        """Be told of what can be done next."""
        if self._client.fileno() < 0:
            return
        waits = self._up or self._begin or self._is_client_ended
        is_held = self._is_paused or self._frames.lacks_room
        events = (0 if waits else select.EPOLLRDHUP if is_held else _IN) | (_OUT if self._down else 0)
        if events != self._watched[0]:
            self._watched[0] = events
            self._poller.watch(self._client, events, self._on_client)
        if self._lingers_until:
            return
        events = (0 if self._down else _IN) | (_OUT if self._up else 0)
        if events != self._watched[1]:
            self._watched[1] = events
            self._poller.watch(self._upstream, events, self._on_upstream)

    def _receive_up(self) -> None:
        """Read from the client and pass it on."""
        for _ in range(_PIECES):
            now = time.monotonic()
            if not self._account.may_send(now):
                self._is_paused = True
                return
            carried = len(self._carried)
            self._buffer[:carried] = self._carried
            size = receive_piece(self._client, self._buffer[carried:])
            if size is None:
                return
            if not size:
                self._end_up()
                return
            self._pass_up(carried + size, now, self._turns.find_room(self.peer))
            if self._up or self._frames.lacks_room or carried + size < PIECE_BYTES:
                return

    def _pass_carried(self, room: int) -> None:
        """Pass on what has come already."""
        size = len(self._carried)
        self._buffer[:size] = self._carried
        self._pass_up(size, time.monotonic(), room)

    def _pass_up(self, size: int, now: float, room: int) -> None:
        """Pass on what is in the buffer, but no more calls than there is room for."""
        frames = self._frames
        if self._is_discarding:
            self._carried, frames.lacks_room = b"", False
            return
        cost, begun = frames.cost, frames.calls.begun
        size, self._carried = frames.follow(self._buffer, size, room)
        if frames.cost != cost:
            self._account.spend(frames.cost - cost, now)
        sent = self._try_upstream(self._buffer[:size])
        if sent < size:
            self._up = memoryview(bytes(self._buffer[sent:size]))
        elif frames.lacks_room:
            self._turns.wait(self)
        if frames.calls.begun != begun:
            self._turns.begin(frames.calls.begun - begun)

    def _send_up(self) -> None:
        self._up = self._up[self._try_upstream(self._up) :]
        if not self._up and self._frames.lacks_room:
            self._turns.wait(self)

    def _try_upstream(self, data: memoryview) -> int:
        """Send to grpcio; where it has closed the connection everything is thrown away, but what it has said counts."""
        try:
            return _send(self._upstream, data)
        except OSError:
            self._is_discarding = True
            return len(data)

    def _end_up(self) -> None:
        """Tell grpcio that the client sends no more."""
        self._is_client_ended = True
        if self._lingers_until:
            self.abort()
        else:
            with suppress(OSError):  # grpcio has closed the connection, of which it is read next
                self._upstream.shutdown(socket.SHUT_WR)

    def _receive_down(self) -> None:
        """Read from grpcio and pass it on."""
        for _ in range(_PIECES):
            size = receive_piece(self._upstream, self._buffer)
            if size is None:
                return
            if not size:
                self._end_down()
                return
            self._account.earn(size)
            self._answers.follow(self._buffer, size)
            sent = _send(self._client, self._buffer[:size])
            if sent < size:
                self._down = memoryview(bytes(self._buffer[sent:size]))
            if self._begin:
                self._begin_up()
            if self._down or size < PIECE_BYTES:
                return

    def _begin_up(self) -> None:
        """Pass on what the client has sent until grpcio has sent its settings."""
        self._try_upstream(memoryview(self._begin))  # which takes it whole, the first that it is sent
        self._begin = b""
        self._pass_carried(self._turns.find_room(self.peer))

    def _send_down(self) -> None:
        sent = _send(self._client, self._down)
        self._down = self._down[sent:]
        if sent:
            self._blocked_since = time.monotonic()

    def _end_down(self) -> None:
        """Tell the client that nothing more comes, and let it close."""
        self._lingers_until = time.monotonic() + _LINGER_S
        self._is_discarding, self._up, self._carried = True, _NOTHING, b""
        self._frames.lacks_room = False
        self._turns.forget(self)
        self._poller.unwatch(self._upstream)
        self._upstream.close()
        if self._is_client_ended:
            self.abort()
            return
        if isinstance(self._client, ssl.SSLSocket):
            with suppress(OSError, ValueError):
                self._client.unwrap()
        self._client.shutdown(socket.SHUT_WR)


def receive_piece(end: socket.socket, room: memoryview) -> int | None:
    """Read what there is, as far as there is room; 0 at the end, None where there is nothing yet."""
    try:
        size = end.recv_into(room)
    except AGAIN:
        return None
    if isinstance(end, ssl.SSLSocket):
        # A record at a time: where there is room for one, none is left where epoll does not see it.
        with suppress(*AGAIN):
            for _ in range(1, _RECORDS):
                more = end.recv_into(room[size:]) if size and len(room) - size >= RECORD_BYTES else 0
                if not more:
                    break
                size += more
    return size


def _send(end: socket.socket, data: memoryview) -> int:
    """Send what is taken; return how much."""
    sent = 0
    with suppress(*AGAIN):
        sent = end.send(data)
        if isinstance(end, ssl.SSLSocket):
            while sent < len(data):
                sent += end.send(data[sent:])
    return sent
