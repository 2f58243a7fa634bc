"""Drops received bytes inside the kernel: bodies that are discarded need not be copied."""

from __future__ import annotations

import asyncio
import socket


def find_descriptor(transport: asyncio.BaseTransport) -> int | None:
    """Return the file descriptor of a transport's socket; None unless it is TCP without TLS."""
    own = transport.get_extra_info("socket")
    is_bare = own is not None and transport.get_extra_info("sslcontext") is None
    return int(own.fileno()) if is_bare and own.family in (socket.AF_INET, socket.AF_INET6) else None


def drop_unread(descriptor: int, buffer: memoryview) -> int:
    """Drop the bytes that a TCP socket has received, at most ``len(buffer)``; return their number.

    0 at the end of the stream and where the connection is broken, which its transport finds out when it reads. Linux
    copies nothing (MSG_TRUNC); other systems copy into ``buffer``.
    """
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    try:
        return own.recv_into(buffer, len(buffer), socket.MSG_TRUNC | socket.MSG_DONTWAIT)
    except OSError:
        return 0
    finally:
        own.detach()  # it stays the transport's
