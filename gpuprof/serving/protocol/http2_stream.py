"""One stream of an HTTP/2 connection: a request that is being received, and its answer under flow control.

Source: RFC 9113, sections 5.1 (streams) and 5.2 (flow control).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gpuprof.serving.protocol.http2_frames import (
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW,
    FrameKind,
    Http2Error,
    Problem,
    frame,
    frame_head,
)
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.wire import Buffer

_MAX_WAITING = 1024  # buffers of answers that the client gives no room for


class Receiver(Protocol):
    """Who takes what a stream brings."""

    @property
    def is_partial(self) -> bool:
        """Whether something has begun to arrive and is not whole."""
        ...

    def sink(self) -> memoryview | None:
        """Return where the next bytes can be received, None: anywhere."""
        ...

    def advance(self, count: int) -> None:
        """Take bytes that were received in the sink."""
        ...

    def feed(self, piece: memoryview) -> None:
        """Take bytes; they are overwritten afterwards."""
        ...

    def ended(self) -> None:
        """Learn that nothing more comes."""
        ...

    def gone(self) -> None:
        """Learn that nobody waits for the answer any more."""
        ...


class Carrier(Protocol):
    """The connection, as its streams see it.

    Attributes
    ----------
    window : int
        Bytes that all streams together may send.
    max_frame : int
    """

    window: int
    max_frame: int

    def write(self, buffers: Sequence[Buffer], slots: Sequence[Slot]) -> None:
        """Write; the slots are given back when that is sent."""
        ...

    def wait_for_window(self, stream: Http2Stream) -> None:
        """Call `Http2Stream.go_on` when the windows may have opened."""
        ...

    def reset(self, stream: Http2Stream) -> None:
        """Break off a stream."""
        ...

    def finished(self, stream: Http2Stream) -> None:
        """Forget a stream that has sent everything."""
        ...


class Http2Stream:
    """Sends what the windows allow and keeps the rest.

    Parameters
    ----------
    carrier : Carrier
    number : int
    window : int
        Bytes that it may send.
    """

    def __init__(self, carrier: Carrier, number: int, window: int) -> None:
        self.number = number
        self.window = window
        self.receiver: Receiver | None = None
        self.client_ended = False
        self.is_open = True
        self.taken = 0
        self._carrier = carrier
        self._waiting: deque[memoryview] = deque()
        self._slots: list[Slot] = []
        self._trailers: bytes | None = None

    @property
    def owes(self) -> bool:
        """Whether there is something that the client gives no room for."""
        return bool(self._waiting)

    def send(
        self,
        headers: bytes = b"",
        data: Sequence[Buffer] = (),
        slots: Sequence[Slot] = (),
        trailers: bytes | None = None,
    ) -> None:
        """Send headers, data and trailers; with trailers the stream ends. ``slots`` are given back in any case."""
        if not self.is_open:
            self._carrier.write((), slots)
            return
        out: list[Buffer] = [frame(FrameKind.HEADERS, END_HEADERS, self.number, headers)] if headers else []
        self._waiting.extend(memoryview(piece) for piece in data if len(piece))
        self._slots += slots
        self._trailers = trailers
        if len(self._waiting) > _MAX_WAITING:
            self._carrier.reset(self)
        else:
            self._flow(out)

    def go_on(self) -> None:
        """Send what there is room for now."""
        if self.is_open:
            self._flow([])

    def widen(self, count: int) -> None:
        """Allow ``count`` bytes more, or fewer.

        Raises
        ------
        Http2Error
            When that is more than a window can be.
        """
        self.window += count
        if self.window > MAX_WINDOW:
            raise Http2Error(Problem.FLOW_CONTROL_ERROR, "the window is too large")

    def drop(self) -> list[Slot]:
        """End without another word; return the memory of what was not sent."""
        slots, self._slots = self._slots, []
        self._waiting.clear()
        self.is_open = False
        if self.receiver is not None:
            self.receiver.gone()
        return slots

    def _flow(self, out: list[Buffer]) -> None:
        carrier = self._carrier
        while self._waiting:
            size = min(sum(map(len, self._waiting)), carrier.max_frame, carrier.window, self.window)
            if size <= 0:
                break
            carrier.window -= size
            self.window -= size
            out.append(frame_head(size, FrameKind.DATA, 0, self.number))
            self._cut(size, out)
        whole = not self._waiting
        if whole and self._trailers is not None:
            out.append(frame(FrameKind.HEADERS, END_HEADERS | END_STREAM, self.number, self._trailers))
            self.is_open = False
        if whole:
            slots, self._slots = self._slots, []
            carrier.write(out, slots)
        else:
            carrier.write(out, ())
            carrier.wait_for_window(self)
        if not self.is_open:
            carrier.finished(self)

    def _cut(self, size: int, out: list[Buffer]) -> None:
        """Move the next ``size`` bytes to ``out``."""
        while size:
            first = self._waiting.popleft()
            if len(first) > size:
                self._waiting.appendleft(first[size:])
                first = first[:size]
            out.append(first)
            size -= len(first)
