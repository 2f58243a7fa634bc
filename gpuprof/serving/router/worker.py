"""The router's view of a worker: its machine replaces it when it dies, and the router kills it when it hangs.

A simulated worker takes the predicted time and computes nothing, for maps of hundreds of replicas.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.rules.routing import is_retry_limit_reached
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.batch_io import INLINE, INLINE_BYTES, count_output_bytes
from gpuprof.serving.transport.datatypes import ITEM_BYTES, ONNX_NAMES, ModelSpec, TensorSpec, is_batched
from gpuprof.serving.transport.inference import Inference, OutputTensor
from gpuprof.serving.transport.wire import Buffer, Frame, FrameConnection, FrameKind
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.worker.runtime import NULL_PREFIX, NullRuntime, null_bytes

if TYPE_CHECKING:
    from onnx import ValueInfoProto

#: Looking up a member of an enumeration takes 0.3 µs in Python 3.11, and each batch needs both.
_RUN, _DONE = FrameKind.RUN, FrameKind.DONE
_WEIGHT = 0.2  # of the last batch in the mean time of batches, by the worker's own clock


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


class BatchReceiver(Protocol):
    """The receiver of a worker's events: its replica."""

    def on_worker_ready(self) -> None:
        """The worker can receive batches."""

    def on_batch_done(self, batch: SentBatch, answer: BatchAnswer) -> None:
        """Take the answer of a batch."""

    def on_batch_failed(self, batch: SentBatch, message: str) -> None:
        """Take a batch on which the model failed."""

    def on_batches_lost(self, batches: list[SentBatch]) -> None:
        """Take the batches of a worker that died."""


class ServedWorker(ABC):
    """Sends a worker its batches and supervises it.

    Parameters
    ----------
    name : str
        For logs, ``"resnet50/0.1"``.
    order : WorkerOrder
    hang_s : float
        A worker whose answer is late by more than this, beyond the expected time of its batches, is killed.

    Attributes
    ----------
    replica : BatchReceiver
        Receives the events of the worker; set by the replica.
    sent : dict of int to SentBatch
        The running batch, and batches sent in advance.
    spec : ModelSpec or None
        Inputs and outputs of the model, as the present worker reports them.
    is_ready : bool
        Whether the worker can receive batches.
    """

    replica: BatchReceiver

    def __init__(self, name: str, order: WorkerOrder, hang_s: float) -> None:
        self.name = name
        self.order = order
        #: True if the worker copies the inputs of its next batch to its device while a batch runs.
        self.stages_ahead = order.provider == ORT_CUDA
        self.sent: dict[int, SentBatch] = {}
        self.spec: ModelSpec | None = None
        self.is_ready = False
        self.restarts = 0
        self.refusals = 0
        self._hang_s = hang_s
        self._numbers = 0
        self._busy_until = 0.0
        self._last_done = 0.0
        self._run_ms = math.inf
        self._stopping = False
        self._refusal: GpuprofError | None = None
        self._was_ready = asyncio.Event()

    async def start(self) -> ModelSpec:
        """Start the worker and wait until it is ready.

        Raises `GpuprofError` when the worker cannot load the model or have its share.
        """
        await self._begin()
        await self._was_ready.wait()
        if self._refusal is not None:
            raise self._refusal
        assert self.spec is not None
        return self.spec

    async def stop(self) -> None:
        """End the worker and wait for its end."""
        self._stopping = True
        await self._end()

    @property
    def pid(self) -> int | None:
        """Process id of the present worker, None while there is none."""
        return None

    @property
    def is_idle(self) -> bool:
        """Return whether the worker is ready and has no batch."""
        return self.is_ready and not self.sent

    def can_prefetch(self, prefetch_ms: float) -> bool:
        """Return whether the worker may receive a batch in advance, while another one runs.

        The limit is two batches including the running batch, or as many short batches as the worker runs in
        ``prefetch_ms``, at most 32. A worker that stages ahead works on two at once, so it gets none in advance while
        it has a request that may kill workers: a request whose earlier worker died runs alone.
        """
        if not self.is_ready:
            return False
        if self.stages_ahead and any(queued.deaths for batch in self.sent.values() for queued in batch.inferences):
            return False
        count = len(self.sent)
        return count < 2 or (count < 32 and count * self._run_ms < prefetch_ms)

    @property
    def requests(self) -> int:
        """Number of requests at the worker."""
        return sum(len(batch.inferences) for batch in self.sent.values())

    def busy_ms(self, now: float) -> float:
        """Return the expected time until the worker has finished its batches."""
        left_ms = 1000.0 * (self._busy_until - now)
        return left_ms if left_ms > 0.0 and self.sent else 0.0

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> None:
        """Send the worker a batch."""
        begin = max(now, self._busy_until) if self.sent else now
        self._busy_until = begin + expected_ms / 1000.0
        self._numbers += 1
        batch = self.sent[self._numbers] = SentBatch(self._numbers, inferences, rows, expected_ms, now)
        self._transmit(batch)

    @abstractmethod
    def watch(self, now: float) -> None:
        """Kill the worker when it has been silent for too long; ping an idle worker."""

    # --- the process

    @abstractmethod
    async def _begin(self) -> None:
        """Start the worker; `_on_ready` follows, again after each replacement."""

    @abstractmethod
    async def _end(self) -> None:
        """End the worker when it has finished its batches, and return once it has gone."""

    @abstractmethod
    def _transmit(self, batch: SentBatch) -> None:
        """Send a batch."""

    def _on_ready(self, spec: ModelSpec) -> None:
        self.spec, self.is_ready = spec, True
        LOGGER.info("worker is ready", extra={"worker": self.name, "pid": self.pid})
        self._was_ready.set()
        self.replica.on_worker_ready()

    def _on_refusal(self, kind: str, message: str, fix: str) -> None:
        self.refusals += 1
        if self._was_ready.is_set():
            LOGGER.error("worker refuses", extra={"worker": self.name, "error": message})
        else:
            self._refusal = (UnavailableError if kind == "UnavailableError" else InputError)(message, fix)

    def _on_done(self, batch: SentBatch, answer: BatchAnswer) -> None:
        now = time.monotonic()
        begin = max(batch.sent, self._last_done)
        for inference in batch.inferences:
            inference.sent = begin  # a batch behind another in the worker still counts as queued
        batch.took_ms = 1000.0 * (now - begin)
        run_ms = (answer.gather_ns + answer.infer_ns + answer.scatter_ns) / 1e6
        self._run_ms = run_ms if math.isinf(self._run_ms) else self._run_ms + _WEIGHT * (run_ms - self._run_ms)
        self._note_end(now)
        self.replica.on_batch_done(batch, answer)

    def _on_failure(self, batch: SentBatch, message: str) -> None:
        self._note_end(time.monotonic())
        self.replica.on_batch_failed(batch, message)

    def _note_end(self, now: float) -> None:
        """Restart the expected times of the worker's remaining batches from now."""
        self._last_done = now
        self._busy_until = now + sum([batch.expected_ms for batch in self.sent.values()]) / 1000.0

    def _on_loss(self) -> None:
        """Report the loss of the worker with its batches."""
        self.is_ready = False
        batches, self.sent = list(self.sent.values()), {}
        if not self._stopping and self._refusal is None:
            self.restarts += 1
            LOGGER.warning("worker died, starts again", extra={"worker": self.name})
            if is_retry_limit_reached(self.restarts) and not self._was_ready.is_set():
                text = f"the worker {self.name} ended {self.restarts} times while it loaded {self.order.path}"
                self._refusal = UnavailableError(text)
        if self._refusal is not None:
            self._was_ready.set()
        self.replica.on_batches_lost(batches)


class ProcessWorker(ServedWorker):
    """A worker's process, run through its machine."""

    def __init__(self, name: str, order: WorkerOrder, hang_s: float, machine: MachineLink, arena: Arena) -> None:
        super().__init__(name, order, hang_s)
        self._machine = machine
        self._arena = arena
        self._number = ""
        self._connection: FrameConnection | None = None
        self._shares_memory = False
        self._pinged: float | None = None
        self._learned_row_bytes = 0.0
        self._output_bytes: dict[int, int | None] = {}
        self._last_pid = -1
        self.identity: list[int] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the present worker, None while there is none."""
        return None if self.identity is None else self.identity[0]

    async def _begin(self) -> None:
        self._number = self._machine.add_worker(self.order, self)

    async def _end(self) -> None:
        if not self._number:
            return
        # This precedes closing the connection, or the machine would start another worker.
        removal = self._machine.remove_worker(self._number)
        if self._connection is not None:
            self._connection.close()
        await removal

    def _transmit(self, batch: SentBatch) -> None:
        requests = []
        payload: list[Buffer] = []
        for inference in batch.inferences:
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

    def watch(self, now: float) -> None:
        """Kill the worker when it has been silent for too long; ping an idle worker."""
        if not self.is_ready:
            return
        expected_s = sum(batch.expected_ms for batch in self.sent.values()) / 1000.0
        if self._silent_s(now) > self._hang_s + 3.0 * expected_s:
            LOGGER.warning("worker hangs, is replaced", extra={"worker": self.name, "pid": self.pid})
            self._kill()
        elif not self.sent:
            self._ping(now)

    def _ping(self, now: float) -> None:
        """Send a ping, unless an earlier ping is unanswered."""
        if self._pinged is None and self._connection is not None:
            self._pinged = now
            self._connection.send(FrameKind.PING, None)

    def _silent_s(self, now: float) -> float:
        """Return the age in seconds of the oldest unanswered message to the worker; 0 if all are answered."""
        send_times = [batch.sent for batch in self.sent.values()] + ([] if self._pinged is None else [self._pinged])
        return now - min(send_times) if send_times else 0.0

    def _kill(self) -> None:
        """Kill the worker; `_on_loss` follows, and the machine starts another."""
        if self.identity is not None:
            self._machine.kill(self._number, self.identity[0])
        if self._connection is not None and not self._shares_memory:
            self._connection.abort()  # its host may be unreachable; remote workers cannot write to the arena

    # --- the rendezvous's and the machine's side

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        """Send a newly connected worker its order."""
        # A dead worker's successor may connect before the end of the old connection is noticed.
        if self._connection is not None:
            self._connection.abort()
            self.on_close()
        self._connection = connection
        self._shares_memory = hello["shares_memory"]
        self.identity = hello["process"]
        self._last_pid = hello["process"][0]
        connection.send(FrameKind.RUN, self.order.to_message())

    def on_close(self) -> None:
        """Report the loss of the worker with its batches."""
        # The kernel unmaps a dying process's memory before it closes its sockets: the process no longer writes to the
        # arena.
        if not self._stopping and self.identity is not None:
            self._machine.kill(self._number, self.identity[0])
        if self._connection is not None:
            self._connection.drop()
        self._connection = self.identity = self._pinged = None
        self._on_loss()

    def on_exit(self, pid: int) -> None:
        """Report a process that ended before it connected; `on_close` reports the others."""
        if pid != self._last_pid:
            self._on_loss()

    def on_machine_loss(self) -> None:
        """Give up a worker whose machine is lost."""
        if self._connection is not None:
            self.on_close()

    def on_refusal(self, kind: str, message: str, fix: str) -> None:
        """Report why the machine cannot start the worker."""
        self._on_refusal(kind, message, fix)
        self._on_loss()

    def receive(self, frame: Frame) -> None:
        """Handle a frame of the worker."""
        self._pinged = None
        if frame.kind == _DONE:
            number, gather_ns, infer_ns, scatter_ns, tensors = frame.head
            outputs = self._outputs(tensors, frame.payload)
            batch = self.sent.pop(number)
            self._on_done(batch, BatchAnswer(gather_ns, infer_ns, scatter_ns, outputs, len(outputs)))
            self._learn_output_size(batch, outputs)
        elif frame.kind == FrameKind.FAILED:
            number, message = frame.head
            self._on_failure(self.sent.pop(number), message)
        elif frame.kind == FrameKind.READY:
            self._output_bytes.clear()
            self._on_ready(ModelSpec.from_message(frame.head))
        elif frame.kind == FrameKind.REFUSED:
            if self.order.mates > 1:  # the process stays for its other models
                self.on_refusal(*frame.head)
            else:
                self._on_refusal(*frame.head)

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
            if self._count_output_bytes(inference.rows) is None:
                size = sum([len(tensor.data) for tensor in tensors])
                self._learned_row_bytes = max(self._learned_row_bytes, size / inference.rows)


SIMULATED_PROVIDER = "simulated"
_DATATYPES = {onnx: datatype for datatype, onnx in ONNX_NAMES.items()}
_zeros = bytearray(INLINE_BYTES)
#: When the last batch of each turn group will be done, on the clock of the event loop.
_turns_until: dict[str, float] = {}


class SimulatedWorker(ServedWorker):
    """Answers batches in sequence with zeros, each after its predicted time."""

    def __init__(self, name: str, order: WorkerOrder, hang_s: float) -> None:
        super().__init__(name, order, hang_s)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._free_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(zlib.crc32(order.group.encode()))

    async def _begin(self) -> None:
        """Read the model's inputs and outputs; the worker is ready at once."""
        self._on_ready(read_simulated_spec(self.order))

    def _transmit(self, batch: SentBatch) -> None:
        """Begin a batch after the earlier batches."""
        takes_s = self._draw_time_ms(batch.rows) / 1000.0
        turns = self.order.turns
        self._free_at = max(batch.sent, self._free_at, _turns_until.get(turns, 0.0)) + takes_s
        if turns:
            _turns_until[turns] = self._free_at
        delay = self._free_at - batch.sent
        self._timers[batch.number] = self._loop.call_later(delay, self._finish, batch, int(1e9 * takes_s))

    def watch(self, now: float) -> None:
        """Do nothing: a simulated worker does not hang."""

    async def _end(self) -> None:
        """End the worker; unfinished batches are lost."""
        if not self.is_ready:
            return
        for timer in self._timers.values():
            timer.cancel()
        self.is_ready = False
        self._loop.call_soon(self._on_loss)

    def _draw_time_ms(self, rows: int) -> float:
        mean = self.order.latency_ms[min(rows, len(self.order.latency_ms)) - 1]
        cv = self.order.latency_cv
        return self._random.gammavariate(1.0 / cv**2, mean * cv**2) if cv > 0.0 else mean

    def _finish(self, batch: SentBatch, infer_ns: int) -> None:
        del self._timers[batch.number], self.sent[batch.number]
        assert self.spec is not None
        outputs = [_outputs(self.spec, inference) for inference in batch.inferences]
        self._on_done(batch, BatchAnswer(0, infer_ns, 0, outputs, len(outputs)))


def read_simulated_spec(order: WorkerOrder) -> ModelSpec:
    """Return a model's inputs and outputs: from its file, or a single number each if there is no file."""
    path = order.path
    if path.startswith(NULL_PREFIX) or not Path(path).is_file():
        size = null_bytes(path) if path.startswith(NULL_PREFIX) else ITEM_BYTES["FP32"]
        return NullRuntime(order.model, order.version, size, order.batch).spec
    from gpuprof.graph.file import read_onnx

    file = read_onnx(Path(path))
    inputs, outputs = (tuple(map(_describe, tensors)) for tensors in (file.inputs, file.model.graph.output))
    batched = is_batched(inputs, outputs)
    return ModelSpec(order.model, order.version, "gpuprof_simulated", inputs, outputs, order.batch if batched else 0)


def _describe(info: ValueInfoProto) -> TensorSpec:
    """Return a tensor as the file declares it; values other than tensors are strings."""
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.element_types import dtype_name

    if not info.type.HasField("tensor_type"):
        return TensorSpec(info.name, "BYTES", (-1,))
    sizes = [size if isinstance(size, int) else -1 for size in declared_dims(info) or ()]
    datatype = _DATATYPES.get(dtype_name(info.type.tensor_type.elem_type), "FP32")
    return TensorSpec(info.name, datatype, (-1, *sizes[1:]))


def _outputs(spec: ModelSpec, inference: Inference) -> list[OutputTensor]:
    positions = range(len(spec.outputs)) if inference.wanted is None else inference.wanted
    tensors = []
    for position in positions:
        tensor = spec.outputs[position]
        shape = [inference.rows if spec.max_batch else 1, *(1 if size == -1 else size for size in tensor.shape[1:])]
        # A string is preceded by its length in 4 bytes, so zeros are empty strings.
        tensors.append(OutputTensor(position, shape, _zero_bytes(prod(shape) * (ITEM_BYTES[tensor.datatype] or 4))))
    return tensors


def _zero_bytes(size: int) -> memoryview:
    global _zeros
    if size > len(_zeros):
        _zeros = bytearray(size)
    return memoryview(_zeros)[:size]
