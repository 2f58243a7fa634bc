"""TLS handshakes of HTTPS: so many of a client at a time, each begun when the client's first record is whole."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gpuprof.serving.protocol.connection_set import ConnectionSet, find_most_connections
from gpuprof.serving.protocol.peer_counts import find_client
from gpuprof.serving.transport.tls_hello import can_begin_tls

#: TLS handshakes that a client has at a time, and connections of it that have not ended theirs.
_AT_ONCE, _MOST_PENDING = 32, 2048
#: A client has so long to begin, and again to finish its handshake; only so long where others of its wait to begin, and
#: the more wait the less, but so long in any case: a round trip.
_HANDSHAKE_S, _CONTENDED_S, _ROUND_TRIP_S = 10.0, 2.0, 0.3
#: Connections that begin their handshake, or end, in a turn of the loop: each takes 0.1 to 0.3 ms.
_WOKEN_AT_ONCE = 32


class HandshakeTurns:
    """Limits the TLS handshakes of each client; its other connections wait as bare sockets.

    The TLS state of a connection takes some 60 KB, and time to create and to free. Who begins a handshake and does not
    go on with it makes room for the next one of the same client after two seconds, or a part of them where hundreds
    wait; of those the newest and the oldest have their turns alternately, and the oldest make room where there are too
    many: an address from which handshakes are begun and left is not shut out.

    Parameters
    ----------
    connect : callable
        Does the handshake on a socket, and whatever comes then.
    at_once, most_pending : int
        Handshakes of a client at a time, and its connections that have not ended theirs.
    """

    def __init__(
        self,
        connect: Callable[[socket.socket], Awaitable[object]],
        at_once: int = _AT_ONCE,
        most_pending: int = _MOST_PENDING,
    ) -> None:
        self._connect, self._at_once = connect, at_once
        self._pending = ConnectionSet[_PendingHandshake](most_pending, find_most_connections())
        self._clients: dict[str, _ClientTurns] = {}
        #: Who is to be told that the first record has come, or the client has gone.
        self._told: deque[tuple[asyncio.Future[bool], bool]] = deque()

    @property
    def turned_away(self) -> int:
        """Connections that were refused or closed because too many had not ended their handshakes."""
        return self._pending.turned_away

    async def shake_hands(self, accepted: socket.socket) -> None:
        """Have the handshake done on a socket when it is its turn.

        Raises
        ------
        OSError
            When the client has gone, does not go on, does not speak TLS, or has too many connections.
        """
        task = asyncio.current_task()
        assert task is not None
        pending = _PendingHandshake(find_client(accepted.getpeername()[0]), task)
        if not self._pending.add(pending, pending.touched):
            raise ConnectionAbortedError("the client has too many connections that wait for TLS")
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._wait_for_hello(accepted)
            await self._take_turn(pending, accepted)
        except asyncio.CancelledError:
            if not pending.is_aborted:
                raise
            raise ConnectionAbortedError("the client has too many connections that wait for TLS") from None
        finally:
            self._pending.discard(pending)

    async def _take_turn(self, pending: _PendingHandshake, accepted: socket.socket) -> None:
        turns = self._clients.setdefault(pending.peer, _ClientTurns(self._at_once))
        try:
            await turns.wait()
            pending.has_turn = True
            try:
                async with asyncio.timeout(_HANDSHAKE_S) as limit:
                    turns.begin(limit)
                    await self._connect(accepted)
            finally:
                turns.end(limit)
        finally:
            if turns.is_unused:
                self._clients.pop(pending.peer, None)

    async def _wait_for_hello(self, accepted: socket.socket) -> None:
        """Wait until the client's first record has come, or no more of it can come.

        Raises `ConnectionAbortedError` when the client has gone.
        """
        loop = asyncio.get_running_loop()
        has_gone: asyncio.Future[bool] = loop.create_future()

        def look() -> None:
            gone = False
            try:
                if not can_begin_tls(accepted):
                    return
            except BlockingIOError:
                return
            except OSError:  # not kept: with its traceback it would be garbage, of thousands of clients for 0.2 s
                gone = True
            loop.remove_reader(file)
            self._tell(has_gone, gone)

        file = accepted.fileno()
        loop.add_reader(file, look)
        try:
            look()
            if await has_gone:
                raise ConnectionAbortedError("the client has gone before TLS began")
        finally:
            loop.remove_reader(file)

    def _tell(self, has_gone: asyncio.Future[bool], gone: bool) -> None:
        """Let whoever waits go on, a few in a turn of the loop: thousands of clients may come or go at once."""
        self._told.append((has_gone, gone))
        if len(self._told) == 1:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        for has_gone, gone in [self._told.popleft() for _ in range(min(_WOKEN_AT_ONCE, len(self._told)))]:
            if not has_gone.done():
                has_gone.set_result(gone)
        if self._told:
            asyncio.get_running_loop().call_soon(self._wake)


class _PendingHandshake:
    """A connection that has not ended its handshake."""

    def __init__(self, peer: str, task: asyncio.Task[object]) -> None:
        self.peer, self._task = peer, task
        self.touched = time.monotonic()
        self.has_turn = self.is_aborted = False

    def is_idle_at(self, now: float) -> bool:
        """Return whether its handshake has not begun."""
        return not self.has_turn

    def is_unfinished_at(self, now: float) -> bool:
        """Return False: nothing has been asked yet."""
        return False

    def abort(self) -> None:
        """Close it."""
        self.is_aborted = True
        self._task.cancel()


class _ClientTurns:
    """Whose turn it is among the connections of one client that can begin their handshakes."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._takes_newest = True
        #: When the time of those that have begun is over, and when they began; the oldest first.
        self._begun: dict[asyncio.Timeout, float] = {}

    @property
    def is_unused(self) -> bool:
        """Whether no connection has a turn or waits for one."""
        return self._free == self._at_once and not self._waiting

    async def wait(self) -> None:
        """Wait until another may begin."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._hurry_oldest()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(turn)
            else:
                self._pass_on()
            raise

    def begin(self, limit: asyncio.Timeout) -> None:
        """Note when the time of a connection is over that begins now."""
        self._begun[limit] = asyncio.get_running_loop().time()
        self._hurry_oldest()

    def end(self, limit: asyncio.Timeout) -> None:
        """Let another one begin."""
        self._begun.pop(limit, None)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.pop() if self._takes_newest else self._waiting.popleft()
            if not turn.done():
                self._takes_newest = not self._takes_newest
                turn.set_result(None)
                return
        self._free += 1

    def _hurry_oldest(self) -> None:
        """Give those that began first less time, as many of them as others wait, and the less the more wait."""
        patience_s = max(min(_ROUND_TRIP_S, _CONTENDED_S), _CONTENDED_S / (1 + len(self._waiting) // self._at_once))
        for limit, began in list(self._begun.items())[: len(self._waiting)]:
            if (limit.when() or 0.0) > began + patience_s and not limit.expired():
                limit.reschedule(began + patience_s)
