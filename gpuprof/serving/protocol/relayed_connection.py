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

from gpuprof.serving.protocol.client_account import ClientAccount
from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, ClientFrames, FrameError, find_preface_end
from gpuprof.serving.protocol.poller import Poller
from gpuprof.serving.transport.tls_hello import can_begin_tls

#: So much is read at once; a piece of TLS is never longer than the least.
PIECE_BYTES, _LEAST_BYTES = 1 << 16, 1 << 14
#: In one direction of a connection, before others have their turn.
_PIECES = 4
#: For the client to close when it has been told everything: what it still sends would else have the system reset the
#: connection, and take from it what it has not read yet.
_LINGER_S = 1.0
#: A client that has not finished its TLS handshake, or that has moved no byte, for so long makes room where there are
#: too many: whether a call is being answered is not known here.
_HANDSHAKE_S, _IDLE_S = 1.0, 5.0
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NOTHING = memoryview(b"")


class PendingConnection:
    """A client that has not yet said what it must say first: that costs no more than a socket.

    Parameters
    ----------
    poller : Poller
    client : socket
        Non-blocking.
    peer : str
        Whose connections are counted together.
    context : SSLContext or None
        For TLS, which begins when the client says something.
    on_ready : callable
        Told when the client has sent the preface and its settings.
    on_closed : callable
        Told when it is given up.

    Attributes
    ----------
    touched : float
        When it was accepted; monotonic seconds.
    frames : ClientFrames
        Of the client.
    begin, carried : bytes
        What grpcio is to be sent first, with the acknowledgement of its settings, and what comes before all else later.
    """

    def __init__(
        self,
        poller: Poller,
        client: socket.socket,
        peer: str,
        context: ssl.SSLContext | None,
        on_ready: Callable[[PendingConnection], None],
        on_closed: Callable[[PendingConnection], None],
    ) -> None:
        self._poller, self.client, self.peer, self._context = poller, client, peer, context
        self._on_ready, self._on_closed = on_ready, on_closed
        self.frames = ClientFrames()
        self.begin = self.carried = b""
        self._said = bytearray()
        self.touched = time.monotonic()
        poller.watch(client, _IN, self._handle)

    def is_idle_at(self, now: float) -> bool:
        """Return whether the client has begun nothing, or has had time to finish it."""
        return not isinstance(self.client, ssl.SSLSocket) or now - self.touched > _HANDSHAKE_S

    def abort(self) -> None:
        """Close the connection."""
        self._poller.unwatch(self.client)
        self.client.close()
        self._on_closed(self)

    def _handle(self, _: int) -> None:
        try:
            if self._context is not None and not self._shake_hands(self._context):
                return
            while more := self.client.recv(_LEAST_BYTES):
                self._said += more
                if length := find_preface_end(self._said):
                    rest = memoryview(self._said[length:])
                    passed, self.carried = self.frames.follow(rest, len(rest))
                    self.begin = bytes(self._said[:length]) + ACKNOWLEDGEMENT + rest[:passed]
                    self._poller.unwatch(self.client)
                    self._on_ready(self)
                    return
            self.abort()
        except _AGAIN:
            pass
        except (OSError, FrameError, ValueError):  # what is no TLS is an OSError, too, or a ValueError
            self.abort()

    def _shake_hands(self, context: ssl.SSLContext) -> bool:
        if not isinstance(self.client, ssl.SSLSocket):
            if not can_begin_tls(self.client):
                return False
            self._poller.unwatch(self.client)
            self.client = context.wrap_socket(self.client, server_side=True, do_handshake_on_connect=False)
            self._poller.watch(self.client, _IN, self._handle)
        self.client.do_handshake()
        self._context = None
        return True


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
    forget : callable
        Told when the connection is closed.

    Attributes
    ----------
    peer : str
        Whose connections are counted together.
    touched : float
        When bytes last moved, to a tick; monotonic seconds.
    """

    __slots__ = (
        "_account",
        "_begin",
        "_blocked_since",
        "_buffer",
        "_carried",
        "_client",
        "_down",
        "_forget",
        "_frames",
        "_has_moved",
        "_is_client_ended",
        "_is_discarding",
        "_is_paused",
        "_lingers_until",
        "_poller",
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
        forget: Callable[[RelayedConnection], None],
    ) -> None:
        self._poller, self._buffer, self._account, self._forget = poller, buffer, account, forget
        self._client, self._upstream, self.peer = pending.client, upstream, pending.peer
        #: Until grpcio has sent its settings nothing is sent to it.
        self._begin, self._carried, self._frames = pending.begin, pending.carried, pending.frames
        #: What could not be passed on yet, to grpcio and to the client.
        self._up = self._down = _NOTHING
        self._is_client_ended = self._is_discarding = self._is_paused = self._has_moved = False
        self._blocked_since = self.touched = time.monotonic()
        self._lingers_until = 0.0
        self._watched = [0, 0]
        self._watch()

    def check(self, now: float, stall_s: float) -> None:
        """Go on where that is a matter of time; close it when its client has not read for ``stall_s``."""
        if self._has_moved:
            self._has_moved, self.touched = False, now
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
        """Return whether no byte has moved for a while."""
        return now - self.touched > _IDLE_S

    def abort(self) -> None:
        """Close both ends."""
        if self._client.fileno() < 0:
            return
        self._up = self._down = _NOTHING
        for end in (self._client, self._upstream):
            self._poller.unwatch(end)
            end.close()
        self._forget(self)

    def _on_client(self, events: int) -> None:
        if self._is_paused and events & ~(_IN | _OUT):
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
        events = (0 if waits else select.EPOLLRDHUP if self._is_paused else _IN) | (_OUT if self._down else 0)
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
            size = _receive(self._client, self._buffer[carried:])
            if size is None:
                return
            self._has_moved = True
            if not size:
                self._end_up()
                return
            self._pass_up(carried + size, now)
            if self._up or carried + size < PIECE_BYTES:
                return

    def _pass_up(self, size: int, now: float) -> None:
        """Pass on what is in the buffer."""
        if self._is_discarding:
            return
        cost = self._frames.cost
        size, self._carried = self._frames.follow(self._buffer, size)
        if self._frames.cost != cost:
            self._account.spend(self._frames.cost - cost, now)
        sent = self._try_upstream(self._buffer[:size])
        if sent < size:
            self._up = memoryview(bytes(self._buffer[sent:size]))

    def _send_up(self) -> None:
        self._up = self._up[self._try_upstream(self._up) :]

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
            size = _receive(self._upstream, self._buffer)
            if size is None:
                return
            if not size:
                self._end_down()
                return
            self._account.earn(size)
            self._has_moved = True
            sent = _send(self._client, self._buffer[:size])
            if sent < size:
                self._down = memoryview(bytes(self._buffer[sent:size]))
            if self._begin:
                self._up, self._begin = memoryview(self._begin), b""
                self._send_up()
            if self._down or size < PIECE_BYTES:
                return

    def _send_down(self) -> None:
        sent = _send(self._client, self._down)
        self._down = self._down[sent:]
        if sent:
            self._blocked_since = time.monotonic()

    def _end_down(self) -> None:
        """Tell the client that nothing more comes, and let it close."""
        self._lingers_until = time.monotonic() + _LINGER_S
        self._is_discarding, self._up = True, _NOTHING
        self._poller.unwatch(self._upstream)
        self._upstream.close()
        if self._is_client_ended:
            self.abort()
            return
        if isinstance(self._client, ssl.SSLSocket):
            with suppress(OSError, ValueError):
                self._client.unwrap()
        self._client.shutdown(socket.SHUT_WR)


def _receive(end: socket.socket, room: memoryview) -> int | None:
    """Read what there is, as far as there is room; 0 at the end, None where there is nothing yet."""
    try:
        size = end.recv_into(room)
    except _AGAIN:
        return None
    if isinstance(end, ssl.SSLSocket):
        # A record at a time: where there is room for one, none is left where epoll does not see it.
        with suppress(*_AGAIN):
            while size and len(room) - size >= _LEAST_BYTES:
                more = end.recv_into(room[size:])
                if not more:
                    break
                size += more
    return size


def _send(end: socket.socket, data: memoryview) -> int:
    """Send what is taken; return how much."""
    sent = 0
    with suppress(*_AGAIN):
        sent = end.send(data)
        if isinstance(end, ssl.SSLSocket):
            while sent < len(data):
                sent += end.send(data[sent:])
    return sent
