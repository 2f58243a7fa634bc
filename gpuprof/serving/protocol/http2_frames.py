"""What client and server send over HTTP/2, frame by frame: nine bytes of each are looked at (RFC 9113, 4.1)."""

from __future__ import annotations

import struct

from gpuprof.serving.protocol.open_calls import OpenCalls

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: A SETTINGS frame that acknowledges the other side's.
ACKNOWLEDGEMENT = b"\0\0\0\4\1\0\0\0\0"
#: Length and type as one number, flags, and the stream.
_HEAD, _HEAD_BYTES = struct.Struct(">IBI"), 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 0, 1, 3, 4, 6, 9
_PING_BYTES = 8
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
    begin, flags, _ = _HEAD.unpack_from(data, len(PREFACE))
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
    calls : OpenCalls
        That have been passed on.
    lacks_room : bool
        Whether the bytes that were not passed on last begin with a call for which there was no room.
    """

    __slots__ = ("_ending", "_is_acknowledged", "_left", "calls", "cost", "lacks_room")

    def __init__(self) -> None:
        self._left = self.cost = 0
        self._is_acknowledged = self.lacks_room = False
        self.calls = OpenCalls()
        #: The call whose last frame has not come whole; 0: none.
        self._ending = 0

    def follow(self, buffer: memoryview, size: int, room: int = 1 << 31) -> tuple[int, bytes]:
        """Return how many of the bytes may be passed on, and those behind them, which are to be put before the next.

        Parameters
        ----------
        buffer : memoryview
            Holds the bytes that come next; the acknowledgement is taken out of it.
        size : int
            How many there are.
        room : int
            How many calls may begin.

        Raises
        ------
        FrameError
            When the head of a call is too long, or in too many frames, or others are between them, or there are too
            many calls.
        """
        position, head, parts, cost, cost_before, head_flags = self._left, -1, 0, 0, 0, 0
        if self._ending and position <= size:
            self.calls.finish(self._ending)
            self._ending = 0
        self.calls.has_moved |= position > 0
        self.lacks_room = False
        while position + _HEAD_BYTES <= size:
            begin, flags, stream = _HEAD.unpack_from(buffer, position)
            length, kind = begin >> 8, begin & 0xFF
            if kind == _HEADERS and head < 0 and self.calls.is_new(stream):
                if not room:
                    self.lacks_room = True
                    break
                room -= 1
            after = position + _HEAD_BYTES + length
            if kind == _DATA:
                cost += length < _SMALL_DATA_BYTES and not flags & _END_STREAM
                self._follow_call(stream, flags, after <= size)
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
                    self._begin_call(stream, head_flags, True)
            elif kind == _HEADERS and not flags & _END_HEADERS:
                head, parts, cost_before = position, 0, cost - 1 - length // _BYTES_PER_COST
                head_flags = flags
            elif kind == _HEADERS:
                self._begin_call(stream, flags, after <= size)
            elif kind == _RST_STREAM:
                self.calls.forget(stream)
            position = after
        if head >= 0:
            self.cost += cost_before
            self._left = 0
            return head, bytes(buffer[head:size])
        self.cost += cost
        self._left = max(0, position - size)
        return min(position, size), bytes(buffer[position:size])

    def _begin_call(self, stream: int, flags: int, is_whole: bool) -> None:
        if not self.calls.begin(stream):
            raise FrameError("more calls than a connection may have")
        self._follow_call(stream, flags, is_whole)

    def _follow_call(self, stream: int, flags: int, is_whole: bool) -> None:
        """Note that a frame of a call has come, and that it was the last where the flags say so."""
        self.calls.has_moved = True
        if flags & _END_STREAM:
            if is_whole:
                self.calls.finish(stream)
            else:
                self._ending = stream


class ServerFrames:
    """Follows the frames that the server sends, of which none is held back, and says which calls they answer.

    Attributes
    ----------
    has_begun : bool
        Whether anything has come.
    ping : bytes
        What the last ping that came says, which is to be acknowledged; empty: none has come.
    """

    __slots__ = ("_begun", "_calls", "_left", "has_begun", "ping")

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self._left = 0
        self.has_begun = False
        self.ping = b""
        #: Of a frame whose nine bytes have not all come.
        self._begun = b""

    def follow(self, buffer: memoryview, size: int) -> None:
        """Look at the bytes that come next; ``size``: how many the buffer holds."""
        begun, calls, self.has_begun = self._begun, self._calls, True
        # Where its next frame begins: before the buffer, if it began with the last one.
        position = self._left - len(begun)
        calls.has_moved |= self._left > 0
        while position + _HEAD_BYTES <= size:
            if position < 0:
                begin, flags, stream = _HEAD.unpack(begun + bytes(buffer[: position + _HEAD_BYTES]))
            else:
                begin, flags, stream = _HEAD.unpack_from(buffer, position)
            position += _HEAD_BYTES + (begin >> 8)
            kind = begin & 0xFF
            if kind <= _HEADERS:
                calls.answer(stream, bool(flags & _END_STREAM))
            elif kind == _RST_STREAM:
                calls.forget(stream)
            elif kind == _PING and not flags & _ACK:
                self.ping = bytes(buffer[max(0, position - _PING_BYTES) : position])
        self._begun = begun + bytes(buffer[:size]) if position < 0 else bytes(buffer[position:size])
        self._left = max(0, position - size)
