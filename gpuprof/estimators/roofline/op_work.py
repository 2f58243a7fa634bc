"""Work of a model's ops as functions of the batch size, so that graphs are read at few batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.model import ModelGraph
from gpuprof.estimators.memory.liveness import peak_activation_bytes

Array = NDArray[Any]

#: Op types that run on matrix units where a device has them.
MATRIX_OPS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "FusedConv", "FusedMatMul", "FusedGemm", "Attention"}
)


#: Op types that process a sequence step by step.
RECURRENT_OPS = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})

_PER_ITEM = ("flops", "bytes_moved")


@dataclass(frozen=True, slots=True)
class GraphWork:
    """FLOPs and bytes of every op at a batch size."""

    op_types: tuple[str, ...]
    dtypes: tuple[str, ...]  #: Type of each op's arithmetic, by its first floating-point tensor.
    #: ``flops``, ``bytes_moved``: Shape (N,). Operations (0 where unknown), bytes read and written.
    flops: Array
    bytes_moved: Array
    unknown_ops: tuple[str, ...]  #: Op types without a formula.
    activation_bytes: float  #: Largest number of live activation bytes.
    weight_bytes: int
    #: Sequential steps of each op: the length of a recurrent op's sequence. Empty: a single step each.
    steps: tuple[int, ...] = ()


class WorkByBatch:
    """Work of a model at any batch size, from its graph at two sizes.

    Every quantity of an op is a fixed part (weights) plus a part in proportion to the batch; where the graph at a third
    size contradicts this (ops that mix the items of a batch), the graph is read at each requested size. ``graph_at``:
    batch size → `ModelGraph`; ``only``: the model's fixed batch.
    """

    def __init__(self, graph_at: Callable[[int], ModelGraph], only: int | None = None) -> None:
        self._graph_at = graph_at
        self.smallest_batch = only or 1  #: 1, or the model's fixed batch.
        self.smallest = work_of(graph_at(self.smallest_batch))
        self._two: GraphWork | None = None
        self._linear = True
        self._by_batch: dict[int, GraphWork] = {}  # a placement asks for each batch under dozens of shares

    @property
    def graph(self) -> ModelGraph:
        """Graph at the smallest accepted batch: 1, or the model's fixed batch."""
        return self._graph_at(self.smallest_batch)

    def at(self, batch: int) -> GraphWork:
        """Return the work at ``batch``. Raises `InputError` when the model's batch is fixed at another size."""
        if batch == self.smallest_batch:
            return self.smallest
        if batch not in self._by_batch:
            self._by_batch[batch] = self._at(batch)
        return self._by_batch[batch]

    def _at(self, batch: int) -> GraphWork:
        if self._two is None:
            self._graph_at(batch)  # in case of an error, the message names the requested batch
            self._two = work_of(self._graph_at(2))
            four = work_of(self._graph_at(4))
            self._linear = len(four.flops) == len(self._two.flops) == len(self.smallest.flops) and all(
                np.allclose(getattr(four, name), getattr(self.smallest, name) + 3 * self._slope(name), rtol=1e-6)
                for name in _PER_ITEM
            )
        if not self._linear:
            return work_of(self._graph_at(batch))
        return replace(
            self.smallest,
            **{name: getattr(self.smallest, name) + (batch - 1) * self._slope(name) for name in _PER_ITEM},
            activation_bytes=self.smallest.activation_bytes + (batch - 1) * float(self._slope("activation_bytes")),
        )

    def _slope(self, name: str) -> Array:
        return np.asarray(getattr(self._two, name) - getattr(self.smallest, name))


def work_of(graph: ModelGraph) -> GraphWork:
    """Return the work of every op of ``graph``."""
    return GraphWork(
        tuple(op.op_type for op in graph.ops),
        tuple(_dtype(op.outputs or op.inputs) for op in graph.ops),
        np.array([float(op.flops or 0) for op in graph.ops]),
        np.array([float(op.bytes_read + op.bytes_written) for op in graph.ops]),
        graph.uncounted_ops,
        float(peak_activation_bytes(graph)),
        graph.weight_bytes,
        tuple(
            steps_of(op.op_type, op.inputs[0].shape if op.inputs else (), op.attributes.get("layout"))
            for op in graph.ops
        ),
    )


def steps_of(op_type: str, sequence: Sequence[int], layout: object = None) -> int:
    """Return the sequential steps of an op: the length of a recurrent op's sequence.

    ``sequence``: shape of the op's first input; ``layout``: ONNX's attribute: 0 or absent puts the sequence first, 1
    the batch.
    """
    axis = 1 if layout == 1 else 0
    return max(1, sequence[axis]) if op_type in RECURRENT_OPS and len(sequence) > axis else 1


def _dtype(tensors: Any) -> str:
    for tensor in tensors:
        if "float" in tensor.dtype:
            return str(tensor.dtype)
    return str(tensors[0].dtype) if tensors else "float32"
