"""The runtime's arena for a model's activations: buffers reused in place and from a free list."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.model import ModelGraph, Op
from gpuprof.estimators.memory.liveness import VIEWS

#: Ops that runtimes let overwrite an input without further readers, or fuse into the input's producer.
_IN_PLACE = frozenset(
    {"Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "HardSigmoid", "Elu", "Erf", "Sqrt", "Exp", "Log",
     "Add", "Mul", "Sub", "Div", "Pow", "Sum", "BatchNormalization", "Softmax", "Cast", "Neg", "Abs", "Where",
     "LayerNormalization", "Gelu", "Reciprocal"}
)  # fmt: skip
#: Alignment in bytes: buffer sizes are multiples of it.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the ops' outputs, without the model's inputs and weights."""

    peak: int  #: Largest number of bytes in use.
    #: Bytes finally requested from the system: a freed buffer is reused where large enough, and split where twice as
    #: large.
    reserved: int


def arena_footprint(graph: ModelGraph) -> Footprint:
    """Return the footprint of the ops in the graph's own order."""
    arena = _Arena()
    weights = {tensor.name for tensor in graph.weights}
    readers = _readers(graph)
    buffers: dict[str, int] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            if tensor.name in weights:
                continue
            shared = _written_over(op, tensor.bytes, readers, buffers)
            owned = buffers.get(shared) if shared is not None else None
            buffers[tensor.name] = arena.take(tensor.bytes) if owned is None else owned
            arena.hold(buffers[tensor.name], readers.get(tensor.name, 0))
        for tensor in op.inputs:
            if tensor.name in buffers:
                arena.release(buffers[tensor.name])
    return Footprint(arena.peak, arena.reserved)


def _written_over(op: Op, size: int, readers: dict[str, int], buffers: dict[str, int]) -> str | None:
    """Return the input whose buffer becomes the op's output."""
    if op.op_type in VIEWS:
        return op.inputs[0].name if op.inputs else None
    if op.op_type not in _IN_PLACE:
        return None
    names = (x.name for x in op.inputs if readers.get(x.name) == 1 and x.bytes == size and x.name in buffers)
    return next(names, None)


def _readers(graph: ModelGraph) -> dict[str, int]:
    """Return the number of reads of each tensor; outputs of the model have another read, and are never freed."""
    counts: dict[str, int] = {}
    for tensor in (*(tensor for op in graph.ops for tensor in op.inputs), *graph.outputs):
        counts[tensor.name] = counts.get(tensor.name, 0) + 1
    return counts


class _Arena:
    """Buffers with the number of their pending reads."""

    def __init__(self) -> None:
        self.peak = self.reserved = self._in_use = 0
        self._free: list[int] = []
        self._sizes: list[int] = []
        self._waiting: list[int] = []

    def take(self, size: int) -> int:
        """Return a buffer of at least ``size``: the smallest sufficient free buffer, or a new buffer."""
        need = -(-size // _ALIGNMENT) * _ALIGNMENT
        fitting = [free for free in self._free if free >= need]
        if fitting:
            chunk = min(fitting)
            self._free.remove(chunk)
            if chunk >= 2 * need:
                self._free.append(chunk - need)
                chunk = need
        else:
            chunk = need
            self.reserved += need
        self._sizes.append(chunk)
        self._waiting.append(0)
        self._in_use += chunk
        self.peak = max(self.peak, self._in_use)
        return len(self._sizes) - 1

    def hold(self, buffer: int, reads: int) -> None:
        """Keep a buffer for ``reads`` more reads; free it at once without pending reads."""
        self._waiting[buffer] += reads
        if self._waiting[buffer] == 0:
            self._release_buffer(buffer)

    def release(self, buffer: int) -> None:
        """Count a read."""
        self._waiting[buffer] -= 1
        if self._waiting[buffer] == 0:
            self._release_buffer(buffer)

    def _release_buffer(self, buffer: int) -> None:
        self._in_use -= self._sizes[buffer]
        self._free.append(self._sizes[buffer])
