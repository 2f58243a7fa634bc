"""Peak memory as a sum of runtimes' allocations, with coefficients fitted to a device's measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np

from gpuprof.domain.model import ModelGraph, Op
from gpuprof.estimators.memory.arena import arena_footprint


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
