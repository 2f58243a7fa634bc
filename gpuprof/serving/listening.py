"""Closes a listening socket without resetting connections that the system has already accepted for it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

#: Of asm-generic/socket.h; Python has no name for it.
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of the packet, that is, drop it


def stop_listening(listening: Iterable[socket.socket]) -> list[socket.socket]:
    """Let no new connection in and return those that wait to be accepted; the caller then closes the sockets.

    Between the last accept and the close a connection could still come, and would be reset with its request on the
    way. So the kernel is first told to drop whatever arrives for the listening socket: such a client tries again
    and is refused, which it can tell from a request that was lost.
    """
    waiting = []
    for listener in listening:
        # A copy: asyncio owns the socket itself, which closing this object would close.
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
