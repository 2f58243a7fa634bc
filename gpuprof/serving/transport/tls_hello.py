"""The beginning of TLS: a handshake takes memory and time, and begins only when there is something to begin with."""

from __future__ import annotations

import socket

_HANDSHAKE = 0x16
#: Of a record (RFC 8446, 5.1): its head, whose last two bytes are the length of the rest, and the rest at most.
_HEAD_BYTES, _MOST_BYTES = 5, 1 << 14


def can_begin_tls(client: socket.socket) -> bool:
    """Return whether the first record of a client has come, or cannot come whole any more, or is no handshake's.

    Else the socket becomes readable when the record is whole.

    Raises
    ------
    BlockingIOError
        When nothing has come.
    ConnectionAbortedError
        When the client has ended without a word.
    """
    data = client.recv(_HEAD_BYTES + _MOST_BYTES, socket.MSG_PEEK)
    if not data:
        raise ConnectionAbortedError("the client has ended before TLS")
    length = _HEAD_BYTES + (int.from_bytes(data[3:5], "big") if len(data) >= _HEAD_BYTES else 0)
    waited_for = client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    # Woken before so many bytes have come, it has ended, or sends pieces so small that they fill the socket's memory.
    if len(data) >= length or waited_for == length or data[:1] != bytes([_HANDSHAKE]) or length > _MOST_BYTES:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return True
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, length)
    return False
