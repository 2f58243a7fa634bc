"""Accepts connections as fast as they come, and stops without resetting those that the system has accepted."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress

from gpuprof.serving.protocol.peer_counts import find_client

#: Of asm-generic/socket.h; Python has no name for it.
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of the packet, that is, drop it
#: Sockets that are accepted in a turn of the loop, a few microseconds each, and that may wait for a protocol; others
#: wait in the kernel's queue.
_ACCEPTED_AT_ONCE, _MOST_ACCEPTED = 256, 4096
#: Bytes of a new connection that are peeked at to find its lane.
_PEEKED_BYTES = 1024
#: Protocols that are created in a turn of the loop, which takes about a millisecond.
CONNECTIONS_PER_TURN = 16


class AcceptedSockets:
    """Accepted sockets that wait for a protocol: lanes in rotation, the oldest and the newest of a lane alternately.

    So a client that opens thousands at once delays no other client by more than one of them, nor its own newest by all
    of them.
    """

    def __init__(self) -> None:
        #: With whether the newest of a lane is its next one.
        self._lanes: dict[Hashable, tuple[deque[socket.socket], bool]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, lane: Hashable, accepted: socket.socket) -> None:
        """Append a socket to its lane."""
        self._lanes.setdefault(lane, (deque(), False))[0].append(accepted)
        self._count += 1

    def take(self) -> socket.socket:
        """Remove and return the next socket; its lane goes to the end."""
        lane = next(iter(self._lanes))
        waiting, takes_newest = self._lanes.pop(lane)
        accepted = waiting.pop() if takes_newest else waiting.popleft()
        self._count -= 1
        if waiting:
            self._lanes[lane] = waiting, not takes_newest
        return accepted


class ConnectionAcceptor:
    """Accepts more connections in a turn of the loop than the loop does by itself.

    libuv accepts one in each turn (libuv/libuv#3696). Under overload, when a turn takes milliseconds, a thousand
    clients would then wait for seconds on connections that they believe open. Accepting a socket is cheap; creating its
    transport and protocol is not. So all are accepted soon and wait here, in lanes, where the kernel's queue would make
    the last one wait for all others.

    Parameters
    ----------
    listening : iterable of socket
        Listening sockets, which remain the loop's.
    make_connection : callable
        Creates transport and protocol of an accepted socket.
    find_lane : callable
        Returns the lane, within its client, of a connection whose first request begins with these bytes; say, its
        model.
    """

    def __init__(
        self,
        listening: Iterable[socket.socket],
        make_connection: Callable[[socket.socket], Awaitable[object]],
        find_lane: Callable[[bytes], Hashable] = lambda beginning: None,
    ) -> None:
        # Copies: asyncio owns the sockets themselves, which closing these objects would close.
        self._listening = [socket.socket(fileno=os.dup(listener.fileno())) for listener in listening]
        for listener in self._listening:
            listener.setblocking(False)
        self._make_connection, self._find_lane = make_connection, find_lane
        self._taking: set[asyncio.Task[None]] = set()
        self._accepted = AcceptedSockets()
        self._is_making = False

    def accept_more(self) -> None:
        """Accept a bounded number of waiting connections; to be called whenever the loop has accepted one."""
        for listener in self._listening:
            with suppress(OSError):  # nobody waits, or there are no files left, which the loop itself finds out again
                for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_ACCEPTED - len(self._accepted))):
                    accepted, address = listener.accept()
                    accepted.setblocking(False)
                    lane = find_client(str(address[0])), self._find_lane(_peek(accepted))
                    self._accepted.add(lane, accepted)
        if not self._is_making:
            self._make_connections()

    def _make_connections(self) -> None:
        """Create the protocols of some accepted sockets now, and of the others in the next turns of the loop."""
        for _ in range(min(CONNECTIONS_PER_TURN, len(self._accepted))):
            task = asyncio.ensure_future(self._connect(self._accepted.take()))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
        self._is_making = bool(self._accepted)
        if self._is_making:
            asyncio.get_running_loop().call_soon(self._make_connections)

    def accept_all(self, backlog: int) -> None:
        """Listen, and accept every connection here instead of in the loop."""
        for listener in self._listening:
            listener.listen(backlog)
            asyncio.get_running_loop().add_reader(listener.fileno(), self.accept_more)

    def close(self) -> list[socket.socket]:
        """Accept no more, and return the accepted sockets that have no protocol yet.

        As long as a copy of a socket is open, the system lets clients connect.
        """
        for listener in self._listening:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        self._listening = []
        return [self._accepted.take() for _ in range(len(self._accepted))]

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._make_connection(accepted)
        except OSError:  # it has gone meanwhile, does not speak TLS, or its client has too many
            accepted.close()
        except BaseException:  # a cancelled TLS handshake, too, must not leave its socket open; it goes on its way
            accepted.close()
            raise


def _peek(accepted: socket.socket) -> bytes:
    """Return the first bytes received on a socket without consuming them."""
    try:
        return accepted.recv(_PEEKED_BYTES, socket.MSG_PEEK)
    except OSError:  # nothing has, or it has gone
        return b""


def stop_listening(listening: Iterable[socket.socket]) -> list[socket.socket]:
    """Let no new connection in, and return those that the kernel has accepted; the caller then closes the sockets.

    Between the last accept and the close a connection could still come, and would be reset with its request on the
    way. So the kernel is first told to drop whatever arrives for the listening socket: such a client tries again
    and is refused, which it can tell from a request that was lost.
    """
    waiting = []
    for listener in listening:
        with socket.socket(fileno=os.dup(listener.fileno())) as duplicate:
            _drop_arrivals(duplicate)
            duplicate.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    waiting.append(duplicate.accept()[0])
    return waiting


def _drop_arrivals(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    with suppress(OSError):  # without the filter the gap is a few microseconds
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
        )
