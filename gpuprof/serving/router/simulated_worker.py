"""A simulated worker that takes the predicted time and computes nothing, for maps of hundreds of replicas."""

from __future__ import annotations

import asyncio
import random
import zlib
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.worker import BatchAnswer, SentBatch, ServedWorker
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.datatypes import ITEM_BYTES, ONNX_NAMES, ModelSpec, TensorSpec, is_batched
from gpuprof.serving.transport.inference import Inference, OutputTensor
from gpuprof.serving.worker.runtime import NULL_PREFIX, NullRuntime, null_bytes

if TYPE_CHECKING:
    from onnx import ValueInfoProto

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
