"""Messages between the router, machines and workers: a small JSON head, and inline bytes of tensors.

A frame is four unsigned 32-bit integers (kind, length of the head, length of the payload, 0), the head, the payload.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, cast

import orjson

_PREFIX = struct.Struct("<IIII")
#: First size of buffers, and the size up to which a frame is written in one piece: copying is cheaper than another
#: buffer.
CHUNK_BYTES = 1 << 17
#: Size limit of frames: a peer that announces more speaks another protocol.
MAX_FRAME_BYTES = (1 << 31) - 1

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """The kinds of a frame."""

    READY = 1  # worker: the model is loaded; head: its metadata
    REFUSED = 2  # worker: loading failed; head: the error's class, message and fix
    RUN = 3  # router: a batch
    DONE = 4  # worker: the batch's outputs
    FAILED = 5  # worker: the model raised an error on the batch
    PING = 6  # router: are you there?
    PONG = 7  # worker, machine: yes
    HELLO = 9  # machine, worker: its name, and the secret
    WELCOME = 10  # router to machine: state of the former machine process; null: none
    ADD_WORKER = 11  # router to machine: keep a worker; head: its id, its order, and its living process, if any
    REMOVE_WORKER = 12  # router to machine: keep a worker no longer
    KILL = 13  # router to machine: end the process of a worker; head: id, process id
    ENDED = 14  # machine: a worker's process has ended; head: id, process id
    WORKER_REMOVED = 15  # machine: a dismissed worker has gone
    APPLY_LAYOUTS = 17  # router to machine: partition GPUs into MIG instances; head: instances by GPU
    PARTS = 18  # machine: the parts after the change; head: its parts, or the error's message and fix
    TAKEOVER_STATE = 16  # machine: state for a successor, should this process end


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class Frame:
    """A message."""

    kind: int
    head: Any
    payload: memoryview


def encode_frame(kind: FrameKind, head: object, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers of a frame, to be written in order."""
    text = orjson.dumps(head)
    size = sum(map(len, payload))
    prefix = _PREFIX.pack(kind, len(text), size, 0)
    if size <= CHUNK_BYTES:
        return [b"".join((prefix, text, *payload))]
    return [prefix + text, *payload]


class FrameBuffer:
    """A buffer that receives a stream and splits it into frames. ``limit``: maximum bytes of a frame; can be raised."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._view = memoryview(bytearray(CHUNK_BYTES))
        self._filled = 0

    def free_view(self) -> memoryview:
        """Return the free part of the buffer, for the next bytes."""
        return self._view[self._filled :]

    def take(self, count: int) -> list[Frame]:
        """Return the frames completed by ``count`` more received bytes.

        Raises `ValueError` when the bytes are no frame.
        """
        self._filled += count
        view, filled, start = self._view, self._filled, 0
        frames = []
        needed = _PREFIX.size
        while filled - start >= _PREFIX.size:
            kind, head, payload, zero = _PREFIX.unpack_from(view, start)
            # The fourth number is always 0, which is unlikely in other protocols.
            if zero or head + payload > self.limit:
                raise ValueError("a frame from the other side makes no sense")
            begin = start + _PREFIX.size
            split = begin + head
            needed = split + payload - start
            if split + payload > filled:
                break
            start = split + payload
            # Copied: the buffer is filled again while a frame may still be read.
            frames.append(Frame(kind, orjson.loads(view[begin:split]), memoryview(bytes(view[split:start]))))
        if start == filled:
            self._filled = 0
            if len(view) > CHUNK_BYTES:
                self._view = memoryview(bytearray(CHUNK_BYTES))
        elif start or needed > len(view):
            remainder = bytes(view[start:filled])
            if needed > len(view):
                self._view = memoryview(bytearray(needed))
            self._filled = len(remainder)
            self._view[: self._filled] = remainder
        return frames


class BlockingStream:
    """Frames over a blocking socket: the worker's side."""

    def __init__(self, connection: socket.socket) -> None:
        # Without a timeout a read would be woken, on the router's time, each time that the router takes an answer from
        # a Unix socket; with one Python polls, which sleeps on. The router pings idle workers twice a second.
        connection.settimeout(86_400.0)
        self._socket = connection
        self._buffer = FrameBuffer()
        self._frames: deque[Frame] = deque()

    def receive(self) -> Frame | None:
        """Wait for the next frame; None when the router has gone."""
        while not self._frames:
            try:
                count = self._socket.recv_into(self._buffer.free_view())
            except OSError:
                return None
            if not count:
                return None
            self._frames.extend(self._buffer.take(count))
        return self._frames.popleft()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the router has gone, waiting at most ``seconds``; frames received meanwhile are kept."""
        if select.select([self._socket], [], [], seconds)[0]:
            frame = self.receive()
            if frame is None:
                return True
            self._frames.appendleft(frame)
        return False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, kind: FrameKind, head: object, payload: Sequence[Buffer] = ()) -> None:
        """Write a frame."""
        buffers = encode_frame(kind, head, payload)
        if len(buffers) > 1 and sum(map(len, buffers)) <= CHUNK_BYTES:
            buffers = [b"".join(buffers)]
        for buffer in buffers:
            self._socket.sendall(buffer)


class FrameReceiver(Protocol):
    """The receiver of a connection's frames."""

    def receive(self, frame: Frame) -> None:
        """Take a frame."""

    def on_close(self) -> None:
        """Handle the end of the connection."""


class FrameConnection(asyncio.BufferedProtocol):
    """Passes complete frames to its receiver, which may be replaced, and sends frames.

    Parameters
    ----------
    receiver : FrameReceiver
    limit : int
        Maximum bytes of a frame.
    """

    def __init__(self, receiver: FrameReceiver, limit: int = MAX_FRAME_BYTES) -> None:
        self.receiver: FrameReceiver | None = receiver
        self._buffer = FrameBuffer(limit)
        self._transport: asyncio.Transport | None = None

    def trust(self) -> None:
        """Accept frames of any size from now on."""
        self._buffer.limit = MAX_FRAME_BYTES

    def send(self, kind: FrameKind, head: object, payload: Sequence[Buffer] = ()) -> None:
        """Send a frame; nothing when the connection has ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        buffers = encode_frame(kind, head, payload)
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)

    def close(self) -> None:
        """End the connection after all data has been sent."""
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """End the connection at once without telling the receiver."""
        self.receiver = None
        self.abort()

    def abort(self) -> None:
        """End the connection at once, discarding unsent data."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, hint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._buffer.free_view()

    def buffer_updated(self, count: int) -> None:
        """Pass on newly completed frames."""
        try:
            frames = self._buffer.take(count)
        except ValueError:  # a peer with another protocol is treated as lost
            self.abort()
            return
        for frame in frames:
            if self.receiver is not None:  # an earlier frame may have dropped it
                self.receiver.receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        """Notify the receiver."""
        self._transport = None
        if self.receiver is not None:
            self.receiver.on_close()
