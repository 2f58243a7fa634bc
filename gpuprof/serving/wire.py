"""Messages between the router and a worker: a small JSON head and the bytes of the tensors that travel inline.

A frame is four unsigned 32-bit integers (kind, length of the head, length of the payload, 0), the head, the payload.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import orjson

_PREFIX = struct.Struct("<IIII")
_CHUNK = 1 << 18
#: No frame is larger: whoever announces more is not speaking this protocol.
MAX_FRAME_BYTES = (1 << 31) - 1

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame says."""

    READY = 1  # worker: the model is loaded; head: its metadata
    REFUSED = 2  # worker: it cannot be; head: the error's class, message and fix
    RUN = 3  # router: a batch
    DONE = 4  # worker: the batch's outputs
    FAILED = 5  # worker: the model raised an error on the batch
    PING = 6  # router: are you there?
    PONG = 7  # worker: yes


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: int
    head: Any
    payload: memoryview


def encode(kind: Kind, head: object, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers of a frame, to be written one after another."""
    text = orjson.dumps(head)
    size = sum(len(part) for part in payload)
    return [_PREFIX.pack(kind, len(text), size, 0) + text, *payload]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._needed = _PREFIX.size

    def feed(self, data: Buffer) -> list[Frame]:
        """Take ``data`` in and return the frames that are now whole.

        Raises
        ------
        ValueError
            When the bytes are no frame.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return []
            data = bytes(self._pending)
        view = memoryview(data)
        frames = []
        start = 0
        while (end := _end_of_frame(view, start)) is not None:
            frames.append(_decode(view[start:end]))
            start = end
        self._pending = bytearray(view[start:])
        self._needed = _size_of_frame(self._pending)
        return frames


class BlockingStream:
    """Frames over a blocking socket: the worker's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray(_CHUNK)
        self._filled = 0

    def receive(self) -> Frame | None:
        """Wait for the next frame; None when the router has gone.

        The payload is valid until the next call.
        """
        while True:
            view = memoryview(self._buffer)[: self._filled]
            end = _end_of_frame(view, 0)
            if end is not None:
                frame = _decode(memoryview(bytes(view[:end])))
                self._filled -= end
                self._buffer[: self._filled] = view[end:]
                return frame
            if not self._fill(max(_CHUNK, _size_of_frame(view))):
                return None

    def send(self, kind: Kind, head: object, payload: Sequence[Buffer] = ()) -> None:
        """Write one frame."""
        buffers = encode(kind, head, payload)
        if sum(map(len, buffers)) <= _CHUNK:
            self._socket.sendall(b"".join(buffers))
            return
        for buffer in buffers:
            self._socket.sendall(buffer)

    def _fill(self, wanted: int) -> bool:
        if wanted > len(self._buffer):
            grown = bytearray(wanted)
            grown[: self._filled] = memoryview(self._buffer)[: self._filled]
            self._buffer = grown
        try:
            count = self._socket.recv_into(memoryview(self._buffer)[self._filled :])
        except ConnectionError:
            return False
        self._filled += count
        return count > 0


def _size_of_frame(view: Buffer) -> int:
    """Return how many bytes the frame that ``view`` starts with has, as far as is known."""
    if len(view) < _PREFIX.size:
        return _PREFIX.size
    _, head, payload, zero = _PREFIX.unpack_from(view)
    if zero or head + payload > MAX_FRAME_BYTES:
        raise ValueError("a frame from the other side makes no sense")
    return _PREFIX.size + int(head) + int(payload)


def _end_of_frame(view: memoryview, start: int) -> int | None:
    rest = view[start:]
    size = _size_of_frame(rest)
    return start + size if _PREFIX.size <= len(rest) and size <= len(rest) else None


def _decode(view: memoryview) -> Frame:
    kind, head, _, _ = _PREFIX.unpack_from(view)
    split = _PREFIX.size + head
    return Frame(kind, orjson.loads(view[_PREFIX.size : split]), view[split:])
