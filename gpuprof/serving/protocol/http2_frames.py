"""Frames of HTTP/2: their heads, and those that are small enough to be made at once.

Source: RFC 9113, sections 4 (frames), 6 (their kinds) and 7 (error codes).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from gpuprof.serving.transport.wire import Buffer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
#: Flags; the first has one meaning for SETTINGS and PING, and another for DATA and HEADERS.
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
#: Of flow control; also the largest number of a stream.
MAX_WINDOW = (1 << 31) - 1
FIRST_WINDOW = (1 << 16) - 1
SMALLEST_FRAME, LARGEST_FRAME = 1 << 14, (1 << 24) - 1
_PRIORITY_BYTES = 5
_SETTING = struct.Struct("!HI")


class FrameKind(IntEnum):
    """What a frame says."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """What SETTINGS may set."""

    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Problem(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """The other side breaks the rules in a way that ends the connection.

    Parameters
    ----------
    problem : Problem
    message : str
    """

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def frame_head(size: int, kind: FrameKind, flags: int, stream: int) -> bytes:
    """Return the head of a frame with a payload of ``size`` bytes."""
    return b"%b%b%b" % (size.to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"))


def frame(kind: FrameKind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def read_frame_head(data: Buffer, position: int) -> tuple[int, int, int, int]:
    """Return size of the payload, kind, flags and stream of the frame at ``position``."""
    size = int.from_bytes(data[position : position + 3], "big")
    stream = int.from_bytes(data[position + 5 : position + HEAD_BYTES], "big") & MAX_WINDOW
    return size, data[position + 3], data[position + 4], stream


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(FrameKind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return what a SETTINGS frame sets.

    Raises
    ------
    Http2Error
        When it is not whole.
    """
    if len(payload) % _SETTING.size:
        raise Http2Error(Problem.FRAME_SIZE_ERROR, "a setting is cut off")
    return _SETTING.iter_unpack(payload)


def number_frame(kind: FrameKind, stream: int, number: int) -> bytes:
    """Return a WINDOW_UPDATE or a RST_STREAM."""
    return frame(kind, 0, stream, number.to_bytes(4, "big"))


def goaway_frame(last: int, problem: Problem) -> bytes:
    """Return a GOAWAY: streams up to ``last`` are answered."""
    return frame(FrameKind.GOAWAY, 0, 0, last.to_bytes(4, "big") + problem.to_bytes(4, "big"))


def header_block(flags: int, payload: bytes) -> bytes:
    """Return the headers of a HEADERS frame without padding and priority.

    Raises
    ------
    Http2Error
        When these are longer than the frame.
    """
    begin = (1 if flags & PADDED else 0) + (_PRIORITY_BYTES if flags & PRIORITY else 0)
    padding = payload[0] if flags & PADDED and payload else 0
    if begin + padding > len(payload):
        raise Http2Error(Problem.PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[begin : len(payload) - padding]
