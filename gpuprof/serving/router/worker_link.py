"""The router's link to a worker, which survives the worker's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.batch_io import INLINE, INLINE_BYTES, count_output_bytes
from gpuprof.serving.transport.frame_connection import FrameConnection
from gpuprof.serving.transport.inference import Inference, OutputTensor
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer, Frame, FrameKind

#: Looking up a member of an enumeration takes 0.3 µs in Python 3.11, and each batch needs both.
_RUN, _DONE = FrameKind.RUN, FrameKind.DONE


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch at a worker, not answered yet.

    ``took_ms`` is set with the answer: the time for which the batch occupied the worker, as seen by the router.
    """

    number: int
    inferences: list[Inference]
    rows: int
    expected_ms: float
    sent: float
    took_ms: float = 0.0


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class BatchAnswer:
    """The answer of a batch: nanoseconds by stage, the outputs of each request, and the number of requests."""

    gather_ns: int
    infer_ns: int
    scatter_ns: int
    outputs: list[list[OutputTensor]]
    requests: int = 1


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Callbacks for the events of a link's worker."""

    on_ready: Callable[[ModelSpec], None]
    on_refusal: Callable[[str, str, str], None]
    on_done: Callable[[SentBatch, BatchAnswer], None]
    on_failure: Callable[[SentBatch, str], None]
    on_loss: Callable[[list[SentBatch]], None]


class WorkerLink:
    """Runs a worker through its machine, sends it batches, forwards its answers, and reports its loss at once."""

    def __init__(self, machine: MachineLink, arena: Arena, events: LinkEvents) -> None:
        self._machine = machine
        self._arena = arena
        self._events = events
        self._number = ""
        self._order: WorkerOrder | None = None
        self._connection: FrameConnection | None = None
        self._shares_memory = False
        self._numbers = 0
        self._pinged: float | None = None
        self._learned_row_bytes = 0.0
        self._output_bytes: dict[int, int | None] = {}
        self._ending = False
        self._last_pid = -1
        self.identity: list[int] | None = None
        self.sent: dict[int, SentBatch] = {}
        self.spec: ModelSpec | None = None
        self.is_ready = False

    async def start(self, order: WorkerOrder) -> None:
        """Run the worker through the machine; `LinkEvents.on_ready` follows, again after each replacement."""
        self._order = order
        self._number = self._machine.add_worker(order, self)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return None if self.identity is None else self.identity[0]

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> SentBatch:
        """Send a batch."""
        self._numbers += 1
        batch = SentBatch(self._numbers, inferences, rows, expected_ms, now)
        self.sent[batch.number] = batch
        requests = []
        payload: list[Buffer] = []
        for inference in inferences:
            tensors = []
            for tensor in inference.inputs:
                if not isinstance(tensor.data, tuple):
                    tensors.append((tensor.shape, INLINE, len(tensor.data)))
                    payload.append(tensor.data)
                elif self._shares_memory:
                    tensors.append((tensor.shape, *tensor.data))
                else:
                    tensors.append((tensor.shape, INLINE, tensor.data[1]))
                    payload.append(self._arena.view(*tensor.data))
            slot = self._reserve_outputs(inference) if self._shares_memory else None
            place = None if slot is None else (slot.offset, slot.size)
            requests.append((inference.rows, tensors, place, inference.wanted))
        assert self._connection is not None
        self._connection.send(_RUN, (batch.number, requests), payload)
        return batch

    def ping(self, now: float) -> None:
        """Send a ping, unless an earlier ping is unanswered."""
        if self._pinged is None and self._connection is not None:
            self._pinged = now
            self._connection.send(FrameKind.PING, None)

    def silent_s(self, now: float) -> float:
        """Return the age of the oldest unanswered message to the worker, in s; 0 without one."""
        send_times = [batch.sent for batch in self.sent.values()] + ([] if self._pinged is None else [self._pinged])
        return now - min(send_times) if send_times else 0.0

    def kill(self) -> None:
        """Kill the worker; `LinkEvents.on_loss` follows, and the machine starts another."""
        if self.identity is not None:
            self._machine.kill(self._number, self.identity[0])
        if self._connection is not None and not self._shares_memory:
            self._connection.abort()  # its host may be unreachable; remote workers cannot write to the arena

    async def end(self) -> None:
        """End the worker when it has finished its batches, and return once it has gone."""
        self._ending = True
        # This precedes closing the connection, or the machine would start another worker.
        removal = self._machine.remove_worker(self._number)
        if self._connection is not None:
            self._connection.close()
        await removal

    # --- the rendezvous's and the machine's side

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        """Send a newly connected worker its order."""
        assert self._order is not None
        # A dead worker's successor may connect before the end of the old connection is noticed.
        if self._connection is not None:
            self._connection.abort()
            self.on_close()
        self._connection = connection
        self._shares_memory = hello["shares_memory"]
        self.identity = hello["process"]
        self._last_pid = hello["process"][0]
        connection.send(FrameKind.RUN, self._order.to_message())

    def on_close(self) -> None:
        """Report the loss of the worker with its batches."""
        # The kernel unmaps a dying process's memory before it closes its sockets: the process no longer writes to the
        # arena.
        if not self._ending and self.identity is not None:
            self._machine.kill(self._number, self.identity[0])
        if self._connection is not None:
            self._connection.drop()
        self._connection = self.identity = self._pinged = None
        self.is_ready = False
        batches, self.sent = list(self.sent.values()), {}
        self._events.on_loss(batches)

    def on_exit(self, pid: int) -> None:
        """Report a process that ended before it connected; `on_close` reports the others."""
        if pid != self._last_pid:
            self._events.on_loss([])

    def on_machine_loss(self) -> None:
        """Give up a worker whose machine is lost."""
        if self._connection is not None:
            self.on_close()

    def on_refusal(self, kind: str, message: str, fix: str) -> None:
        """Report why the machine cannot start the worker."""
        self._events.on_refusal(kind, message, fix)
        self._events.on_loss([])

    def receive(self, frame: Frame) -> None:
        """Handle a frame of the worker."""
        self._pinged = None
        if frame.kind == _DONE:
            number, gather_ns, infer_ns, scatter_ns, tensors = frame.head
            outputs = self._outputs(tensors, frame.payload)
            batch = self.sent.pop(number)
            self._learn_output_size(batch, outputs)
            self._events.on_done(batch, BatchAnswer(gather_ns, infer_ns, scatter_ns, outputs, len(outputs)))
        elif frame.kind == FrameKind.FAILED:
            number, message = frame.head
            self._events.on_failure(self.sent.pop(number), message)
        elif frame.kind == FrameKind.READY:
            self.spec = ModelSpec.from_message(frame.head)
            self._output_bytes.clear()
            self.is_ready = True
            self._events.on_ready(self.spec)
        elif frame.kind == FrameKind.REFUSED:
            assert self._order is not None
            if self._order.mates > 1:  # the process stays for its other models
                self.on_refusal(*frame.head)
            else:
                self._events.on_refusal(*frame.head)

    def _outputs(self, tensor_lists: list[Any], payload: memoryview) -> list[list[OutputTensor]]:
        start = 0
        requests = []
        for tensors in tensor_lists:
            outputs = []
            for position, shape, offset, size in tensors:
                if offset == INLINE:
                    outputs.append(OutputTensor(position, shape, payload[start : start + size]))
                    start += size
                else:
                    outputs.append(OutputTensor(position, shape, self._arena.view(offset, size)))
            requests.append(outputs)
        return requests

    def _reserve_outputs(self, inference: Inference) -> Any:
        """Reserve arena memory for outputs too large for the message."""
        if inference.output_slot is None and self.spec is not None:
            size = self._count_output_bytes(inference.rows)
            if size is None:
                # A quarter more than the largest row so far; larger outputs travel in the message.
                size = int(1.25 * self._learned_row_bytes * inference.rows)
            if size > INLINE_BYTES:
                inference.output_slot = self._arena.take(size)
        return inference.output_slot

    def _count_output_bytes(self, rows: int) -> int | None:
        """Return `count_output_bytes` of the worker's model, computed once for each number of rows."""
        assert self.spec is not None
        if rows not in self._output_bytes:
            self._output_bytes[rows] = count_output_bytes(self.spec, rows)
        return self._output_bytes[rows]

    def _learn_output_size(self, batch: SentBatch, outputs: list[list[OutputTensor]]) -> None:
        """Record the output size of models with open shapes."""
        for inference, tensors in zip(batch.inferences, outputs, strict=True):
            if inference.output_slot is None and self._count_output_bytes(inference.rows) is None:
                size = sum([len(tensor.data) for tensor in tensors])
                self._learned_row_bytes = max(self._learned_row_bytes, size / inference.rows)
