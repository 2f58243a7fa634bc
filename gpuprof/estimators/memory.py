"""Memory of a model: live tensors, the arena of the runtime, and what processes reserve beyond them.

The memory reserved by PyTorch's allocator was fitted by ``python -m bench.creq`` to Table A.1 of Elvinger's thesis
(ETH, 2024): thirteen models on a V100, batches of 4 to 128. Memory there is linear in the batch. Its constant part is
the weights, held once, without copies and without the CUDA context. Its slope exceeds the live activations, since an
allocator keeps the blocks that it once requested, and convolutions need workspaces: 0.9 (bert) to 4.2 times as much
(alexnet), 6.9 for gpt2, whose logits and cache the exported classifier lacks.

Whole processes of ONNX Runtime were measured by NVML: four networks at batch 1 to 64 on an H200 (`bench/gpu/results`).
Their constant part is the CUDA context and the code of cuDNN and cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Self

import numpy as np

from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph, Op
from gpuprof.estimators.constants import constant

#: Ops whose output is their first input's memory under another shape, in runtimes' execution.
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})


def peak_activation_bytes(graph: ModelGraph) -> int:
    """Return the largest number of live bytes of inputs, outputs and activations at any op, in the graph's order.

    A tensor lives from its producer to its last reader; inputs of the graph live from the start, outputs to the end; an
    op that only changes a shape shares its input's memory.
    """
    owner, weights = _owners(graph), {tensor.name for tensor in graph.weights}
    born = {tensor.name: (0, tensor.bytes) for tensor in graph.inputs}
    for position, op in enumerate(graph.ops):
        for tensor in op.outputs:
            if owner[tensor.name] == tensor.name and tensor.name not in weights:
                born[tensor.name] = (position, tensor.bytes)
    unread = dict.fromkeys((tensor.name for tensor in graph.inputs), len(graph.ops))
    last = unread | _last_use(graph, owner)
    changes = [0] * (len(graph.ops) + 2)
    for name, (position, size) in born.items():
        changes[position] += size
        changes[last.get(name, position) + 1] -= size
    return max(accumulate(changes))


def _owners(graph: ModelGraph) -> dict[str, str]:
    owner: dict[str, str] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            source = op.inputs[0].name if op.op_type in VIEWS and op.inputs else tensor.name
            owner[tensor.name] = owner.get(source, source)
    return owner


def _last_use(graph: ModelGraph, owner: dict[str, str]) -> dict[str, int]:
    """Return the position of the last op that reads each tensor; outputs of the graph are kept to the end."""
    last: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        for tensor in op.inputs:
            last[owner.get(tensor.name, tensor.name)] = position
    for tensor in graph.outputs:
        last[owner.get(tensor.name, tensor.name)] = len(graph.ops)
    return last


#: Ops that runtimes let overwrite an input without further readers, or fuse into the input's producer.
_IN_PLACE = frozenset(
    {"Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "HardSigmoid", "Elu", "Erf", "Sqrt", "Exp", "Log",
     "Add", "Mul", "Sub", "Div", "Pow", "Sum", "BatchNormalization", "Softmax", "Cast", "Neg", "Abs", "Where",
     "LayerNormalization", "Gelu", "Reciprocal"}
)  # fmt: skip


def arena_footprint(graph: ModelGraph) -> ActivationArena:
    """Return the arena after the ops in the graph's own order, which holds their outputs, no inputs and weights."""
    arena = ActivationArena()
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
            arena.add_readers(buffers[tensor.name], readers.get(tensor.name, 0))
        for tensor in op.inputs:
            if tensor.name in buffers:
                arena.add_readers(buffers[tensor.name], -1)
    return arena


def _written_over(op: Op, size: int, readers: dict[str, int], buffers: dict[str, int]) -> str | None:
    """Return the input whose buffer the op can reuse for its output, None without one."""
    if op.op_type in VIEWS:
        return op.inputs[0].name if op.inputs else None
    if op.op_type not in _IN_PLACE:
        return None
    names = (x.name for x in op.inputs if readers.get(x.name) == 1 and x.bytes == size and x.name in buffers)
    return next(names, None)


def _readers(graph: ModelGraph) -> dict[str, int]:
    """Return the number of readers of each tensor; outputs of the model have an extra reader, so they are not freed."""
    counts: dict[str, int] = {}
    for tensor in (*(tensor for op in graph.ops for tensor in op.inputs), *graph.outputs):
        counts[tensor.name] = counts.get(tensor.name, 0) + 1
    return counts


class ActivationArena:
    """The allocated buffers at one point of the execution, each with its number of remaining readers.

    Attributes
    ----------
    peak, reserved : int
        Largest number of bytes in use; bytes finally requested from the system: a freed buffer is reused where large
        enough, and split where twice as large.
    """

    def __init__(self) -> None:
        self.peak = self.reserved = self._in_use = 0
        self._free: list[int] = []
        self._sizes: list[int] = []
        self._waiting: list[int] = []

    def take(self, size: int) -> int:
        """Return a buffer of at least ``size``: the smallest sufficient free buffer, or a new buffer."""
        need = -(-size // 256) * 256  # aligned
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

    def add_readers(self, buffer: int, count: int) -> None:
        """Keep a buffer for more readers, or for fewer if negative; free it if none is left."""
        self._waiting[buffer] += count
        if self._waiting[buffer] == 0:
            self._in_use -= self._sizes[buffer]
            self._free.append(self._sizes[buffer])


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """Copies of the weights, the arena for activations, inputs and outputs, and a constant per model.

    Runtimes keep weights once as read and once in the layout of their kernels, those of convolutions in blocks; arenas
    exceed the live tensors. Unlike trees, the model extrapolates beyond the sizes of its training data.
    """

    coefficients: tuple[float, ...]  #: Factors of `list_parts`, at least 0.

    @classmethod
    def fit(cls, graphs: Iterable[ModelGraph], peak_bytes: Sequence[float]) -> Self:
        """Return the model with the least relative errors on measured peaks."""
        from scipy.optimize import nnls  # half a second to import, not needed without training

        peak = np.array(peak_bytes)
        parts = np.array([list_parts(graph) for graph in graphs])
        coefficients, _ = nnls(parts / peak[:, None], np.ones(len(peak)))
        return cls(tuple(coefficients.tolist()))

    def peak_bytes(self, graph: ModelGraph) -> float:
        """Return the peak memory of a model."""
        return max(1.0, float(np.dot(list_parts(graph), self.coefficients)))


def list_parts(graph: ModelGraph) -> list[float]:
    """Return bytes of weights by their kind, of the arena, of inputs and outputs, the number of ops, and a constant,
    scaled so that all coefficients are of similar size.
    """
    products = _count_weights(op for op in graph.ops if op.op_type in ("Gemm", "MatMul"))
    convolutions = _count_weights(op for op in graph.ops if "Conv" in op.op_type)
    arena = arena_footprint(graph)
    return [
        float(products),
        float(convolutions),
        float(max(0, graph.weight_bytes - products - convolutions)),
        float(arena.peak),
        float(arena.reserved),
        float(sum(tensor.bytes for tensor in (*graph.inputs, *graph.outputs))),
        1e5 * len(graph.ops),
        1e7,
    ]


def _count_weights(ops: Iterable[Op]) -> int:
    """Return the bytes of the ops' weights, with weights shared by several ops counted once."""
    return sum({weight.name: weight.bytes for op in ops for weight in op.weights}.values())


def workspace_bytes(op: Op) -> int:
    """Return the bytes of the unfolded input of a convolution (im2col) for one image; 0 for other ops."""
    if op.op_type != "Conv" or len(op.inputs) < 2 or not op.outputs or len(op.outputs[0].shape) < 3:
        return 0
    window = prod(op.inputs[1].shape[1:])
    item = op.inputs[0].bytes // max(1, op.inputs[0].elements)
    return 0 if prod(op.inputs[1].shape[2:]) == 1 else window * prod(op.outputs[0].shape[2:]) * item


SOURCE = "weights and live activations, scaled"
#: Begin of the source of a whole process's memory, with its context.
PROCESS = "process, "


def predict_reserved(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the memory reserved by a process, excluding its CUDA context; its lower end is at least the weights.

    ``precision``: type of the counted bytes, to be named in the figure's source; None: the types of the file.
    """
    value = constant("memory", "weights") * weight_bytes + constant("memory", "activations") * activation_bytes
    source = SOURCE if precision is None else f"{SOURCE}, in {precision}"
    low, high = constant("memory", "low") * value, constant("memory", "high") * value
    return Figure(value, source, max(weight_bytes, low), high)


def predict_held(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of ONNX Runtime, with its interval; ``precision`` as in `predict_reserved`."""
    context, held = constant("memory", "process_bytes"), constant("memory", "held_activations") * activation_bytes
    value = context + weight_bytes + held
    source = f"{PROCESS}{SOURCE}" if precision is None else f"{PROCESS}{SOURCE}, in {precision}"
    low = constant("memory", "least_process_bytes") + weight_bytes + constant("memory", "low") * held
    return Figure(value, source, low, context + constant("memory", "high") * (value - context))


def predict_process(weight_bytes: float, activation_bytes: float, precision: str | None = None) -> Figure:
    """Return the GPU memory of a process of PyTorch or a compiler: reserved memory, CUDA context and code.

    ``precision``: as `predict_reserved`.
    """
    reserved, context = predict_reserved(weight_bytes, activation_bytes, precision), constant("memory", "process_bytes")
    low = constant("memory", "least_process_bytes") + (reserved.low or 0.0)
    return Figure(context + reserved.value, f"{PROCESS}{reserved.source}", low, 2.0 * context + reserved.upper())


def context_fraction(granted_fraction: float) -> float:
    """Return the context size of a client with a fraction of the SMs, relative to that with the whole GPU."""
    return 1.0 - constant("memory", "context_by_sms") * (1.0 - granted_fraction)


def shrink_context(figure: Figure, granted_fraction: float) -> Figure:
    """Return the memory of a process that is an MPS client with a fraction of the SMs.

    Its CUDA context reserves local memory only for the threads of granted SMs. The interval's upper end stays.
    """
    saved = 1.0 - context_fraction(granted_fraction)
    value = figure.value - saved * constant("memory", "process_bytes")
    low = None if figure.low is None else figure.low - saved * constant("memory", "least_process_bytes")
    return replace(figure, value=value, low=low)
