"""One HTTP/2 connection of a server: large data is received straight into the arena and large answers sent from it.

Clients may send a message in one frame and need not wait for windows: what bounds the memory is the arena, and what
receives the streams. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

from gpuprof.serving.protocol.http2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    HEAD_BYTES,
    LARGEST_FRAME,
    MAX_WINDOW,
    PADDED,
    PREFACE,
    SMALLEST_FRAME,
    FrameKind,
    Http2Error,
    Problem,
    Setting,
    frame,
    goaway_frame,
    header_block,
    number_frame,
    read_frame_head,
    read_settings,
    settings_frame,
)
from gpuprof.serving.protocol.http2_headers import MAX_BLOCK_BYTES, HeaderReader
from gpuprof.serving.protocol.http2_stream import Http2Stream, Receiver
from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.wire import Buffer

SCRATCH_BYTES = 1 << 16
_SMALL_BYTES = 1 << 12  # copying is cheaper than telling the system where each piece lies
_MAX_STREAMS = 1000
_MAX_UNSENT_BYTES = 1 << 23
_MAX_UNANNOUNCED = 1 << 28  # bytes received since the windows were opened again
_SETTINGS = {
    Setting.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
    Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
    Setting.MAX_FRAME_SIZE: LARGEST_FRAME,
    Setting.MAX_HEADER_LIST_SIZE: MAX_BLOCK_BYTES,
}
_GREETING = settings_frame(_SETTINGS) + number_frame(FrameKind.WINDOW_UPDATE, 0, MAX_WINDOW - FIRST_WINDOW)


class Site(Protocol):
    """What connections share."""

    arena: Arena
    scratch: bytearray
    connections: set[Http2Connection]

    def open(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> Receiver:
        """Return what takes a new stream."""
        ...


class Http2Connection(asyncio.BufferedProtocol):
    """Reads frames, and carries the answers of its streams.

    Parameters
    ----------
    site : Site
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._pending = b""
        self._began = False
        self._headers = HeaderReader()
        self._block: tuple[int, int, bytes] | None = None
        self._receiving: Http2Stream | None = None
        self._left = self._padding = self._unannounced = 0
        self._ends = False
        self._sink: memoryview | None = None
        self._streams: dict[int, Http2Stream] = {}
        self._blocked: dict[int, Http2Stream] = {}
        self._last = 0
        self._first_window = FIRST_WINDOW
        self._unsent: deque[tuple[int, Slot]] = deque()
        self._written = 0
        self._paused = self._leaving = False
        self.window = FIRST_WINDOW
        self.max_frame = SMALLEST_FRAME
        self.touched = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been asked that is not answered."""
        return self._began and not self._streams and not self._unsent

    @property
    def is_stuck(self) -> bool:
        """Whether only the client can make it go on."""
        if not self._began or self._pending or self._unsent:
            return True
        waiting = (
            stream.owes or stream.receiver is None or stream.receiver.is_partial for stream in self._streams.values()
        )
        return any(waiting)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet; the transport's buffer counts from the first byte, to know when memory is free again."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._site.connections.add(self)
        self.write([_GREETING])

    def get_buffer(self, hint: int) -> memoryview:
        """Return where the next bytes go: to the message that is being received, when there is room for it."""
        receiver = self._receiving.receiver if self._left and self._receiving is not None else None
        self._sink = None if receiver is None else receiver.sink()
        return memoryview(self._site.scratch) if self._sink is None else self._sink[: self._left]

    def buffer_updated(self, count: int) -> None:
        """Take in what arrived."""
        self.touched = time.monotonic()
        try:
            if self._sink is not None:
                self._advance(count)
            else:
                data = memoryview(self._site.scratch)[:count]
                if self._pending:
                    data = memoryview(self._pending + data)
                self._pending = bytes(data[self._consume(data) :])
        except Http2Error as error:
            self._break_off(error)

    def resume_writing(self) -> None:
        """Everything is sent: the memory of the answers is free."""
        self.touched = time.monotonic()
        self._release()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Give everything back."""
        self._transport = None
        self._site.connections.discard(self)
        for stream in list(self._streams.values()):
            self._forget(stream)
        self._release()

    # --- the streams' side

    def write(self, buffers: Sequence[Buffer], slots: Sequence[Slot] = ()) -> None:
        """Write; the slots are given back when that is sent, or when it never will be."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and buffers:
            size = sum(map(len, buffers))
            self._written += size
            if size <= _SMALL_BYTES:
                transport.write(b"".join(buffers))
            else:
                transport.writelines(buffers)
            if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES and not self._paused:
                self._paused = True  # whoever does not read is not read
                transport.pause_reading()
        self._unsent.extend((self._written, slot) for slot in slots)
        self._release()

    def wait_for_window(self, stream: Http2Stream) -> None:
        """Let a stream go on when the windows have opened."""
        self._blocked[stream.number] = stream

    def finished(self, stream: Http2Stream) -> None:
        """Forget a stream that has sent everything; what still comes for it is not wanted."""
        if not stream.client_ended:
            self.write([number_frame(FrameKind.RST_STREAM, stream.number, Problem.NO_ERROR)])
        self._forget(stream)

    def reset(self, stream: Http2Stream) -> None:
        """Break a stream off whose client takes no answers."""
        self.write([number_frame(FrameKind.RST_STREAM, stream.number, Problem.ENHANCE_YOUR_CALM)])
        self._forget(stream)

    # --- the server's side

    def leave(self) -> None:
        """Answer what has been asked, and nothing more."""
        self._leaving = True
        self.write([goaway_frame(self._last, Problem.NO_ERROR)])

    def close(self) -> None:
        """Close the connection after what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- reading

    def _consume(self, data: memoryview) -> int:
        """Take everything that is whole; return how far that is."""
        position, end = 0, len(data)
        if not self._began:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise Http2Error(Problem.PROTOCOL_ERROR, "it does not speak HTTP/2")
            if end < len(PREFACE):
                return 0
            position, self._began = len(PREFACE), True
        while position < end and self._transport is not None:
            if self._left or self._padding:
                position = self._take_data(data, position, end)
                continue
            if end - position < HEAD_BYTES:
                break
            size, kind, flags, number = read_frame_head(data, position)
            start = position + HEAD_BYTES
            if self._block is not None and (kind != FrameKind.CONTINUATION or number != self._block[0]):
                raise Http2Error(Problem.PROTOCOL_ERROR, "headers are not continued")
            if kind == FrameKind.DATA:
                if flags & PADDED and start == end:
                    break
                position = self._begin_data(data, start, size, flags, number)
                continue
            if size > MAX_BLOCK_BYTES:
                raise Http2Error(Problem.FRAME_SIZE_ERROR, "the frame is too large")
            if end - start < size:
                break
            position = start + size
            self._take_frame(kind, flags, number, bytes(data[start:position]))
        return position

    def _begin_data(self, data: memoryview, start: int, size: int, flags: int, number: int) -> int:
        """Prepare for the payload of a DATA frame, which begins at ``start``; return where what it brings begins."""
        if not number or (number > self._last and not self._leaving):
            raise Http2Error(Problem.PROTOCOL_ERROR, "data of a stream that was not opened")
        self._unannounced = self._announce(0, self._unannounced + size)
        padding = 0
        if flags & PADDED:
            padding = data[start]
            start += 1
            size -= 1
            if padding > size:
                raise Http2Error(Problem.PROTOCOL_ERROR, "the padding is longer than the frame")
        stream = self._receiving = self._streams.get(number)
        self._left, self._padding, self._ends = size - padding, padding, bool(flags & END_STREAM)
        if stream is not None:
            stream.taken = self._announce(number, stream.taken + size)
        if not size:
            self._end_data()
        return start

    def _announce(self, number: int, taken: int) -> int:
        """Open a window again by what was taken when that is much; return what remains to be announced."""
        if taken < _MAX_UNANNOUNCED:
            return taken
        self.write([number_frame(FrameKind.WINDOW_UPDATE, number, taken)])
        return 0

    def _take_data(self, data: memoryview, position: int, end: int) -> int:
        count = min(end - position, self._left)
        if count:
            self._left -= count
            if self._receiving is not None and self._receiving.receiver is not None and self._receiving.is_open:
                self._receiving.receiver.feed(data[position : position + count])
        skipped = min(end - position - count, self._padding) if not self._left else 0
        self._padding -= skipped
        if not self._left and not self._padding:
            self._end_data()
        return position + count + skipped

    def _advance(self, count: int) -> None:
        """Take data that was received where it belongs."""
        assert self._receiving is not None and self._receiving.receiver is not None
        self._sink = None
        self._left -= count
        self._receiving.receiver.advance(count)
        if not self._left and not self._padding:
            self._end_data()

    def _end_data(self) -> None:
        stream, self._receiving = self._receiving, None
        if stream is not None and self._ends:
            _end(stream)

    def _take_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        match kind:
            case FrameKind.HEADERS:
                self._take_headers(number, flags, header_block(flags, payload))
            case FrameKind.CONTINUATION:
                if self._block is None:
                    raise Http2Error(Problem.PROTOCOL_ERROR, "there are no headers to continue")
                _, begun, block = self._block
                self._take_headers(number, begun | flags & END_HEADERS, block + payload)
            case FrameKind.RST_STREAM:
                if (stream := self._streams.get(number)) is not None:
                    stream.client_ended = True
                    self._forget(stream)
            case FrameKind.SETTINGS:
                if not flags & ACK:
                    self._take_settings(payload)
            case FrameKind.PING:
                if not flags & ACK:
                    self.write([frame(FrameKind.PING, ACK, 0, payload)])
            case FrameKind.WINDOW_UPDATE:
                self._widen(number, int.from_bytes(payload, "big") & MAX_WINDOW)
            case FrameKind.PUSH_PROMISE:
                raise Http2Error(Problem.PROTOCOL_ERROR, "clients cannot push")
            case _:  # priorities, farewells, and what later versions may bring
                pass

    def _take_headers(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > MAX_BLOCK_BYTES:
            raise Http2Error(Problem.ENHANCE_YOUR_CALM, "the headers are too long")
        self._block = None if flags & END_HEADERS else (number, flags, block)
        if self._block is not None:
            return
        headers = self._headers.read(block)
        stream = self._streams.get(number)
        if stream is None and number > self._last:
            stream = self._open(number, headers)
        if stream is not None and flags & END_STREAM:
            _end(stream)

    def _open(self, number: int, headers: dict[bytes, bytes]) -> Http2Stream | None:
        if not number % 2:
            raise Http2Error(Problem.PROTOCOL_ERROR, "streams of clients have odd numbers")
        if self._leaving:
            return None  # it knows from the farewell that nobody answers
        self._last = number
        if len(self._streams) >= _MAX_STREAMS:
            self.write([number_frame(FrameKind.RST_STREAM, number, Problem.REFUSED_STREAM)])
            return None
        stream = Http2Stream(self, number, self._first_window)
        self._streams[number] = stream
        stream.receiver = self._site.open(stream, headers)
        return stream

    def _take_settings(self, payload: bytes) -> None:
        for name, value in read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.widen(value - self._first_window)
                self._first_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                if not SMALLEST_FRAME <= value <= LARGEST_FRAME:
                    raise Http2Error(Problem.PROTOCOL_ERROR, "there are no frames of that size")
                self.max_frame = value
        self.write([frame(FrameKind.SETTINGS, ACK, 0)])
        self._go_on()

    def _widen(self, number: int, count: int) -> None:
        if number:
            stream = self._streams.get(number)
            if stream is not None:
                stream.widen(count)
                if self._blocked.pop(number, None) is not None:
                    stream.go_on()
            return
        self.window += count
        if self.window > MAX_WINDOW:
            raise Http2Error(Problem.FLOW_CONTROL_ERROR, "the window is too large")
        self._go_on()

    def _go_on(self) -> None:
        """Let the streams that wait for windows send, the longest waiting first."""
        blocked, self._blocked = self._blocked, {}
        for stream in blocked.values():
            stream.go_on()

    # --- ending

    def _forget(self, stream: Http2Stream) -> None:
        self._streams.pop(stream.number, None)
        self._blocked.pop(stream.number, None)
        self.write((), stream.drop())

    def _release(self) -> None:
        """Give back the memory of what has been sent."""
        transport = self._transport
        gone = transport is None or transport.is_closing()
        sent = self._written if transport is None or gone else self._written - transport.get_write_buffer_size()
        while self._unsent and self._unsent[0][0] <= sent:
            self._site.arena.give_back(self._unsent.popleft()[1])

    def _break_off(self, error: Http2Error) -> None:
        """Say what is wrong, and close."""
        self._left = self._padding = 0
        self._receiving = None
        self._pending = b""
        self.write([goaway_frame(self._last, error.problem)])
        self.close()


def _end(stream: Http2Stream) -> None:
    """Tell a stream that its client has said everything."""
    stream.client_ended = True
    if stream.is_open and stream.receiver is not None:
        stream.receiver.ended()
