"""The router's end of one worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gpuprof.serving.arena import Arena
from gpuprof.serving.batch_io import INLINE, INLINE_BYTES, output_room
from gpuprof.serving.inference import Inference, OutputTensor
from gpuprof.serving.launcher import Launcher, WorkerOrder, WorkerProcess
from gpuprof.serving.metadata import ModelSpec
from gpuprof.serving.wire import Buffer, Frame, FrameReader, Kind, encode


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch that a worker has and has not answered.

    ``took_ms`` is set when it is answered: for how long it kept the worker from the next, as the router sees it.
    """

    number: int
    inferences: list[Inference]
    rows: int
    expected_ms: float
    sent: float
    took_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What came back of a batch: nanoseconds by stage, and the outputs of each request."""

    gather_ns: int
    infer_ns: int
    scatter_ns: int
    outputs: list[list[OutputTensor]]


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Whom a link tells what happens to its worker."""

    ready: Callable[[ModelSpec], None]
    refused: Callable[[str, str, str], None]
    done: Callable[[SentBatch, BatchAnswer], None]
    failed: Callable[[SentBatch, str], None]
    lost: Callable[[list[SentBatch]], None]


class Link(Protocol):
    """What a seat needs of a worker, real or simulated; see `WorkerLink`."""

    sent: dict[int, SentBatch]
    spec: ModelSpec | None
    is_ready: bool
    is_alive: bool
    ended: asyncio.Future[None] | None

    @property
    def pid(self) -> int | None:
        """The worker's process."""
        ...

    async def start(self, order: WorkerOrder) -> None:
        """Start the worker."""
        ...

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> SentBatch:
        """Send a batch."""
        ...

    def ping(self, now: float) -> None:
        """Ask for a sign of life."""
        ...

    def silent_s(self, now: float) -> float:
        """Return for how long the worker has owed an answer."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...

    def close(self) -> None:
        """Let the worker end."""
        ...


class WorkerLink(asyncio.Protocol):
    """Starts a worker, sends it batches, hands on its answers, and says at once when it has gone.

    Parameters
    ----------
    launcher : Launcher
    arena : Arena
    events : LinkEvents
    """

    def __init__(self, launcher: Launcher, arena: Arena, events: LinkEvents) -> None:
        self._launcher = launcher
        self._arena = arena
        self._events = events
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: WorkerProcess | None = None
        self._numbers = 0
        self._pinged: float | None = None
        self._learned_row_bytes = 0.0
        self.sent: dict[int, SentBatch] = {}
        self.spec: ModelSpec | None = None
        self.is_ready = False
        self.is_alive = False
        self._closing = False
        self.ended: asyncio.Future[None] | None = None

    async def start(self, order: WorkerOrder) -> None:
        """Start the worker; it says by an event when it is ready.

        Raises
        ------
        OSError
            When no process can be started.
        """
        self._process, connection = self._launcher.launch(order)
        self.is_alive = True
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)
        self._write(Kind.RUN, order.to_message())

    @property
    def pid(self) -> int | None:
        """The worker's process, None before it was started."""
        return None if self._process is None else self._process.pid

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> SentBatch:
        """Send a batch."""
        self._numbers += 1
        batch = SentBatch(self._numbers, inferences, rows, expected_ms, now)
        self.sent[batch.number] = batch
        described = []
        payload: list[Buffer] = []
        for inference in inferences:
            tensors = []
            for tensor in inference.inputs:
                if isinstance(tensor.data, tuple):
                    tensors.append((tensor.shape, *tensor.data))
                else:
                    tensors.append((tensor.shape, INLINE, len(tensor.data)))
                    payload.append(tensor.data)
            slot = self._room(inference)
            place = None if slot is None else (slot.offset, slot.size)
            described.append((inference.rows, tensors, place, inference.wanted))
        self._write(Kind.RUN, (batch.number, described), payload)
        return batch

    def ping(self, now: float) -> None:
        """Ask for a sign of life, unless one is still awaited."""
        if self._pinged is None:
            self._pinged = now
            self._write(Kind.PING, None)

    def silent_s(self, now: float) -> float:
        """Return for how long the worker has owed an answer."""
        owed = [batch.sent for batch in self.sent.values()] + ([] if self._pinged is None else [self._pinged])
        return now - min(owed) if owed else 0.0

    def kill(self) -> None:
        """End the worker at once; `LinkEvents.lost` follows."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let the worker end in its own time."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand on the worker's messages."""
        try:
            for frame in self._reader.feed(data):
                self._receive(frame)
        except ValueError:  # it no longer speaks the protocol: as good as dead
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell what the worker still had."""
        # The system takes a dying process's memory away before its sockets: it can no longer write to the arena.
        if not self._closing:
            self.kill()
        self.is_alive = self.is_ready = False
        sent, self.sent = list(self.sent.values()), {}
        assert self._process is not None
        self.ended = asyncio.get_running_loop().run_in_executor(None, self._process.reap)
        self._events.lost(sent)

    def _receive(self, frame: Frame) -> None:
        self._pinged = None
        if frame.kind == Kind.DONE:
            number, gather_ns, infer_ns, scatter_ns, described = frame.head
            outputs = self._outputs(described, frame.payload)
            batch = self.sent.pop(number)
            self._learn(batch, outputs)
            self._events.done(batch, BatchAnswer(gather_ns, infer_ns, scatter_ns, outputs))
        elif frame.kind == Kind.FAILED:
            number, message = frame.head
            self._events.failed(self.sent.pop(number), message)
        elif frame.kind == Kind.READY:
            self.spec = ModelSpec.from_message(frame.head)
            self.is_ready = True
            self._events.ready(self.spec)
        elif frame.kind == Kind.REFUSED:
            self._events.refused(*frame.head)

    def _outputs(self, described: list[Any], payload: memoryview) -> list[list[OutputTensor]]:
        start = 0
        requests = []
        for tensors in described:
            outputs = []
            for position, shape, offset, size in tensors:
                if offset == INLINE:
                    outputs.append(OutputTensor(position, shape, payload[start : start + size]))
                    start += size
                else:
                    outputs.append(OutputTensor(position, shape, self._arena.view(offset, size)))
            requests.append(outputs)
        return requests

    def _room(self, inference: Inference) -> Any:
        """Reserve memory for the outputs of a request, where they are too large for the message."""
        if inference.output_slot is None and self.spec is not None:
            room = output_room(self.spec, inference.rows)
            if room is None:
                room = int(1.25 * self._learned_row_bytes * inference.rows)
            if room > INLINE_BYTES:
                inference.output_slot = self._arena.take(room)
        return inference.output_slot

    def _learn(self, batch: SentBatch, outputs: list[list[OutputTensor]]) -> None:
        """Remember how large the outputs of models with open shapes are."""
        for inference, tensors in zip(batch.inferences, outputs, strict=True):
            if inference.output_slot is None:
                size = sum(len(tensor.data) for tensor in tensors)
                self._learned_row_bytes = max(self._learned_row_bytes, size / inference.rows)

    def _write(self, kind: Kind, head: object, payload: list[Buffer] | None = None) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        buffers = encode(kind, head, payload or ())
        self._transport.write(b"".join(buffers) if len(buffers) > 1 else buffers[0])
