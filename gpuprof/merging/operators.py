"""The weighted operators of a model: convolutions and matrix products with a constant, and their start times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.common import Matrix
from gpuprof.merging.normalisation import whole
from gpuprof.merging.source import SourceModel

_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "Attention", "FusedMatMul"}
_CONVOLUTIONS = {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv"}


@dataclass(frozen=True, slots=True)
class Moment:
    """The start time of a node: number of weighted operators before it, then number of other ops since the last.

    The paper's start times (§3.2) come from kernel durations. Here every weighted operator takes a unit of time and
    other ops almost none, so that the same layer of two models starts at the same time even if their other ops differ a
    little. Moments grow along every edge of a graph, so merging nodes of equal moments never forms a cycle.
    """

    level: int
    depth: float

    def __lt__(self, moment: Moment) -> bool:
        return (self.level, self.depth) < (moment.level, moment.depth)


@dataclass(frozen=True, slots=True)
class WeightedOperator:
    """A weighted operator."""

    position: int  #: Position of the node in the source.
    node: NodeProto
    kind: str  #: "conv" or "matmul".
    weight: str  #: The constant; behind a DequantizeLinear the quantised constant.
    level: int  #: Start time: number of weighted operators before it on the longest path from an input.

    @property
    def name(self) -> str:
        """Name of the operator in reports: its node's name, or its first output's."""
        return self.node.name or self.node.output[0]


def weighted_operators(source: SourceModel) -> list[WeightedOperator]:
    """Return the weighted operators of a normalised source, in the order of its nodes."""
    dequantised = _dequantised_weights(source)
    operators = []
    for position, (node, moment) in enumerate(zip(source.nodes, moments(source), strict=True)):
        weight = _weight(node, source, dequantised)
        if weight is not None:
            kind = "conv" if node.op_type in _CONVOLUTIONS else "matmul"
            operators.append(WeightedOperator(position, node, kind, weight, moment.level))
    return operators


def moments(source: SourceModel) -> list[Moment]:
    """Return the start time of each node."""
    dequantised = _dequantised_weights(source)
    ready: dict[str, Moment] = {}
    all_moments = []
    for node in source.nodes:
        inputs = [ready[name] for name in (*node.input, *list_captured(node)) if name in ready]
        level = max((moment.level for moment in inputs), default=0)
        depth = 1 + max((moment.depth for moment in inputs if moment.level == level), default=0.0)
        is_weighted = _weight(node, source, dequantised) is not None
        # Weighted operators come last in their level, because they are matched by level alone.
        moment = Moment(level, math.inf if is_weighted else depth)
        all_moments.append(moment)
        after = Moment(level + 1, 0) if is_weighted else moment
        ready |= dict.fromkeys((name for name in node.output if name), after)
    return all_moments


def weight_matrix(source: SourceModel, operator: WeightedOperator) -> Matrix:
    """Return the weight as the paper's matrix: of shape (inputs, outputs), for a convolution (filters, rest)."""
    array: Any = source.array(operator.weight)
    if array.dtype.kind not in "fiub":  # NumPy has no arithmetic for bfloat16 and 8-bit floats
        # The conversion is exact: 8-bit floats fit into float16, bfloat16 into float32.
        array = array.astype("float32").astype("float16" if array.dtype.itemsize == 1 else "float32")
    if operator.kind == "conv":
        return array.reshape(array.shape[0], -1)  # type: ignore[no-any-return]
    if operator.node.op_type == "Gemm" and whole(operator.node, "transB", 0):
        return array.T  # type: ignore[no-any-return]
    return array.reshape(-1, array.shape[-1])  # type: ignore[no-any-return]


def shareable_constants(source: SourceModel, node: NodeProto) -> tuple[str, ...]:
    """Return the weights of an op that are shared whole or not at all: lookup tables, and those of recurrent ops.

    Such ops are not among the matrix operators of §2.4. Empty where the weights are smaller than the model's mean: many
    models have the same small table, of positions.
    """
    inputs = node.input[:1] if is_lookup(node) else node.input[1:3] if node.op_type in ("LSTM", "GRU", "RNN") else []
    names = tuple(name for name in inputs if name in source.weights and len(source.weights[name].dims) >= 2)
    mean = sum(map(source.weight_bytes, source.weights)) / max(1, len(source.weights))
    return names if names and not node.domain and sum(map(source.weight_bytes, names)) >= mean else ()


def is_lookup(node: NodeProto) -> bool:
    """Return whether an op is a lookup, which reads only the requested rows of its table."""
    return node.op_type == "Gather"


def _dequantised_weights(source: SourceModel) -> dict[str, str]:
    """Return output of a DequantizeLinear of a constant → quantised constant."""
    return {
        node.output[0]: node.input[0]
        for node in source.nodes
        if node.op_type == "DequantizeLinear" and node.input[0] in source.weights
    }


def _weight(node: NodeProto, source: SourceModel, dequantised: dict[str, str]) -> str | None:
    position = 3 if node.op_type.startswith("QLinear") else 1
    if node.op_type not in _PRODUCTS | _CONVOLUTIONS or len(node.input) <= position:
        return None
    name = dequantised.get(node.input[position], node.input[position])
    tensor = source.weights.get(name)
    return name if tensor is not None and len(tensor.dims) >= 2 else None
