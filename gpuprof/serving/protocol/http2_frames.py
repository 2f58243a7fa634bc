"""What a client sends over HTTP/2, frame by frame: nine bytes of each are looked at (RFC 9113, 4.1)."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: A SETTINGS frame that acknowledges the other side's.
ACKNOWLEDGEMENT = b"\0\0\0\4\1\0\0\0\0"
#: Length and type as one number, flags; then the stream.
_HEAD, _HEAD_BYTES = struct.Struct(">IB"), 9
_DATA, _HEADERS, _SETTINGS, _CONTINUATION = 0, 1, 4, 9
_END_STREAM = _ACK = 1
_END_HEADERS = 4
#: Clients announce about six settings, of six bytes each.
_MOST_SETTINGS_BYTES = 1 << 10
#: Of the head of a call that comes in several frames; one frame has no more (RFC 9113, 4.2).
_MOST_HEAD_BYTES, _MOST_HEAD_PARTS = 1 << 14, 16
#: Data of fewer bytes is no part of a large message: unless it ends one, it counts as a control frame does.
_SMALL_DATA_BYTES = 16
#: A frame costs one, and one more for each of so many bytes.
_BYTES_PER_COST = 256


class FrameError(Exception):
    """What a client sends is not HTTP/2, or more of one thing than it may send."""


def find_preface_end(data: bytes | bytearray) -> int:
    """Return the length of what a client must send first, the preface and its settings; 0 while it is not whole.

    Raises
    ------
    FrameError
        When it begins with something else.
    """
    if not PREFACE.startswith(data[: len(PREFACE)]):
        raise FrameError("no preface of HTTP/2")
    after = len(PREFACE) + _HEAD_BYTES
    if len(data) < after:
        return 0
    begin, flags = _HEAD.unpack_from(data, len(PREFACE))
    if begin & 0xFF != _SETTINGS or flags & _ACK or begin >> 8 > _MOST_SETTINGS_BYTES:
        raise FrameError("no settings behind the preface")
    end = after + int(begin >> 8)
    return end if len(data) >= end else 0


class ClientFrames:
    """Follows the frames of a client behind preface and settings, without its first acknowledgement of settings.

    The head of a call that comes in several frames is held back until it is whole: grpcio takes also what a connection
    that is closed leaves of one for a call.

    Attributes
    ----------
    cost : int
        Of all frames so far but those with data.
    """

    __slots__ = ("_is_acknowledged", "_left", "cost")

    def __init__(self) -> None:
        self._left = self.cost = 0
        self._is_acknowledged = False

    def follow(self, buffer: memoryview, size: int) -> tuple[int, bytes]:
        """Return how many of the bytes may be passed on, and those behind them, which are to be put before the next.

        Parameters
        ----------
        buffer : memoryview
            Holds the bytes that come next; the acknowledgement is taken out of it.
        size : int
            How many there are.

        Raises
        ------
        FrameError
            When the head of a call is too long, or in too many frames, or others are between them.
        """
        position, head, parts, cost, cost_before = self._left, -1, 0, 0, 0
        while position + _HEAD_BYTES <= size:
            begin, flags = _HEAD.unpack_from(buffer, position)
            length, kind = begin >> 8, begin & 0xFF
            after = position + _HEAD_BYTES + length
            if kind == _DATA:
                cost += length < _SMALL_DATA_BYTES and not flags & _END_STREAM
            elif kind == _SETTINGS and flags & _ACK and not length and not self._is_acknowledged:
                self._is_acknowledged = True
                buffer[position : size - _HEAD_BYTES] = bytes(buffer[after:size])
                size -= _HEAD_BYTES
                continue
            else:
                cost += 1 + length // _BYTES_PER_COST
            if head >= 0:
                parts += 1
                if kind != _CONTINUATION or parts > _MOST_HEAD_PARTS or after - head > _MOST_HEAD_BYTES:
                    raise FrameError("the head of a call is too long, or something else is in it")
                if flags & _END_HEADERS and after <= size:
                    head = -1
            elif kind == _HEADERS and not flags & _END_HEADERS:
                head, parts, cost_before = position, 0, cost - 1 - length // _BYTES_PER_COST
            position = after
        if head >= 0:
            self.cost += cost_before
            self._left = 0
            return head, bytes(buffer[head:size])
        self.cost += cost
        self._left = max(0, position - size)
        return min(position, size), bytes(buffer[position:size])
