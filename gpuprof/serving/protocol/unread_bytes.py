"""Bytes that a connection has received, removed where they lie: of bodies that are discarded nobody needs a copy."""

from __future__ import annotations

import asyncio
import socket


def find_descriptor(transport: asyncio.BaseTransport) -> int | None:
    """Return the descriptor of a transport's socket; None where what it receives is encrypted, or is not TCP."""
    own = transport.get_extra_info("socket")
    is_bare = own is not None and transport.get_extra_info("sslcontext") is None
    return int(own.fileno()) if is_bare and own.family in (socket.AF_INET, socket.AF_INET6) else None


def drop_unread(descriptor: int, room: memoryview) -> int:
    """Remove as many bytes as a socket of TCP has received, at most those that ``room`` holds; return their number.

    It is 0 at the end of what comes and where the connection is broken, which its transport finds out when it reads.
    Linux copies nothing; other systems copy into ``room``.
    """
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    try:
        return own.recv_into(room, len(room), socket.MSG_TRUNC | socket.MSG_DONTWAIT)
    except OSError:
        return 0
    finally:
        own.detach()  # it stays the transport's
