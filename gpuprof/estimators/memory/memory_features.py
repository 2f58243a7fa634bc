"""Features that determine a running model's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import prod

from gpuprof.domain.model import ModelGraph, Op
from gpuprof.estimators.memory.arena import arena_footprint
from gpuprof.estimators.memory.liveness import peak_activation_bytes

MEMORY_FEATURES = (
    "log_least", "log_weights", "log_activations", "weight_part", "log_largest_op", "log_workspace",
    "log_matrix_weights", "log_convolution_weights", "log_arena_peak", "log_arena_reserved", "log_inputs_outputs",
    "log_ops", "log_batch",
)  # fmt: skip


def memory_features(graph: ModelGraph) -> list[float]:
    """Return the features of a graph; the first is log(1 + weights + peak live activations)."""
    weights, activations = float(graph.weight_bytes), float(peak_activation_bytes(graph))
    largest = max((sum(t.bytes for t in (*op.inputs, *op.outputs)) - op.weight_bytes for op in graph.ops), default=0)
    matrices = _weights_of(op for op in graph.ops if op.op_type in ("Gemm", "MatMul"))
    convolutions = _weights_of(op for op in graph.ops if "Conv" in op.op_type)
    arena = arena_footprint(graph)
    return [
        math.log1p(weights + activations),
        math.log1p(weights),
        math.log1p(activations),
        weights / max(1.0, weights + activations),
        math.log1p(largest),
        math.log1p(max((workspace_bytes(op) for op in graph.ops), default=0)),
        math.log1p(matrices),
        math.log1p(convolutions),
        math.log1p(arena.peak),
        math.log1p(arena.reserved),
        math.log1p(sum(tensor.bytes for tensor in (*graph.inputs, *graph.outputs))),
        math.log1p(len(graph.ops)),
        math.log(graph.batch),
    ]


def _weights_of(ops: Iterable[Op]) -> int:
    """Return the bytes of the ops' weights, with weights shared by several ops counted once."""
    return sum({weight.name: weight.bytes for op in ops for weight in op.weights}.values())


def workspace_bytes(op: Op) -> int:
    """Return the bytes of the unfolded input of a convolution (im2col) for one image; 0 for other ops."""
    if op.op_type != "Conv" or len(op.inputs) < 2 or not op.outputs or len(op.outputs[0].shape) < 3:
        return 0
    window = prod(op.inputs[1].shape[1:])
    item = op.inputs[0].bytes // max(1, op.inputs[0].elements)
    return 0 if prod(op.inputs[1].shape[2:]) == 1 else window * prod(op.outputs[0].shape[2:]) * item
