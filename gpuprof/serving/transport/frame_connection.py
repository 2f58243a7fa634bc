"""A connection of an event loop for frames: the router's side of machines and workers, and a machine's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

from gpuprof.serving.transport.wire import MAX_FRAME_BYTES, Buffer, Frame, FrameBuffer, FrameKind, encode_frame


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
        """Take frames of any size from now on."""
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
        """End the connection at once, whatever the other side does."""
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
