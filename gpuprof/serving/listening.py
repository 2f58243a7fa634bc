"""Accepts connections as fast as they come, and stops without resetting those that the system has accepted."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

#: Of asm-generic/socket.h; Python has no name for it.
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of the packet, that is, drop it
#: Connections that are accepted in a turn of the loop, beside that of the loop itself: a millisecond or two.
_ACCEPTED_AT_ONCE = 16


class ConnectionIntake:
    """Accepts more connections in a turn of the loop than the loop does by itself.

    libuv accepts one in each turn (libuv/libuv#3696). While turns take milliseconds, as under overload, a thousand
    clients that connect then wait for seconds, believing that they are connected, and what they ask is not heard.
    ``listening``: they stay the loop's; ``take_in``: makes a connection of a socket that was accepted.
    """

    def __init__(
        self, listening: Iterable[socket.socket], take_in: Callable[[socket.socket], Awaitable[object]]
    ) -> None:
        # Copies: asyncio owns the sockets themselves, which closing these objects would close.
        self._listening = [socket.socket(fileno=os.dup(listener.fileno())) for listener in listening]
        for listener in self._listening:
            listener.setblocking(False)
        self._take_in = take_in
        self._taking: set[asyncio.Task[None]] = set()

    def accept_more(self) -> None:
        """Accept those that wait, up to a number; to be called when the loop has accepted one."""
        for listener in self._listening:
            with suppress(OSError):  # nobody waits, or there are no files left, which the loop itself finds out again
                for _ in range(_ACCEPTED_AT_ONCE):
                    accepted = listener.accept()[0]
                    accepted.setblocking(False)
                    task = asyncio.ensure_future(self._connect(accepted))
                    self._taking.add(task)
                    task.add_done_callback(self._taking.discard)

    def close(self) -> None:
        """Accept no more: as long as a copy of a socket is open, the system lets clients connect."""
        for listener in self._listening:
            listener.close()
        self._listening = []

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            with suppress(OSError):  # it has gone meanwhile, or does not speak TLS
                await self._take_in(accepted)
        except BaseException:  # a cancelled TLS handshake, too, must not leave its socket open; it goes on its way
            accepted.close()
            raise


def stop_listening(listening: Iterable[socket.socket]) -> list[socket.socket]:
    """Let no new connection in and return those that wait to be accepted; the caller then closes the sockets.

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
