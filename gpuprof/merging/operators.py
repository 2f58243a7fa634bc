"""The weighted operators of a model: convolutions and matrix products with a constant, and when each starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.normalisation import whole
from gpuprof.merging.source import SourceModel
from gpuprof.merging.submatrix import Matrix

#: Position of the weight among the inputs, by op type.
WEIGHT_INPUT = {
    "Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3, "MatMul": 1, "Gemm": 1, "MatMulInteger": 1,
    "QLinearMatMul": 3, "Attention": 1, "FusedMatMul": 1, "DeformConv": 1,
}  # fmt: skip
_LAST = 2**31
_CONVOLUTIONS = {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv"}


@dataclass(frozen=True, slots=True)
class Moment:
    """When a node starts: after how many weighted operators, and then after how many others.

    The paper's start times (§3.2) come from kernel durations; here every weighted operator takes one unit of time
    and all else next to none, so that the same layer of two models starts at the same time even where their
    other ops differ a little. Along every edge of a graph moments grow, so nodes merged only at equal moments
    never form a cycle.
    """

    level: int
    depth: int

    def __lt__(self, other: Moment) -> bool:
        return (self.level, self.depth) < (other.level, other.depth)


@dataclass(frozen=True, slots=True)
class WeightedOperator:
    """A weighted operator."""

    position: int  #: Of its node in the source.
    node: NodeProto
    kind: str  #: One of "conv", "matmul".
    weight: str  #: The constant; behind a DequantizeLinear the quantised one.
    level: int  #: Its start time: how many weighted operators come before it on the longest way from an input.

    @property
    def name(self) -> str:
        """What reports call the operator: its node's name, or what it gives."""
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
    """Return when each node starts."""
    dequantised = _dequantised_weights(source)
    ready: dict[str, Moment] = {}
    all_moments = []
    for node in source.nodes:
        given = [ready[name] for name in (*node.input, *list_captured(node)) if name in ready]
        level = max((moment.level for moment in given), default=0)
        depth = 1 + max((moment.depth for moment in given if moment.level == level), default=0)
        weighted = _weight(node, source, dequantised) is not None
        # Weighted operators are the last of their level: they are matched by level alone, whatever leads to them.
        moment = Moment(level, _LAST if weighted else depth)
        all_moments.append(moment)
        after = Moment(level + 1, 0) if weighted else moment
        ready |= dict.fromkeys((name for name in node.output if name), after)
    return all_moments


def weight_matrix(source: SourceModel, operator: WeightedOperator) -> Matrix:
    """Return the weight as the matrix of the paper: (inputs, outputs), for a convolution (filters, rest)."""
    array: Any = source.array(operator.weight)
    if array.dtype.kind not in "fiub":  # bfloat16 and the eight-bit floats, which NumPy has no arithmetic for
        # Nothing is lost: eight-bit floats fit into a half, and bfloat16 into a float32.
        array = array.astype("float32").astype("float16" if array.dtype.itemsize == 1 else "float32")
    if operator.kind == "conv":
        return array.reshape(array.shape[0], -1)  # type: ignore[no-any-return]
    if operator.node.op_type == "Gemm" and whole(operator.node, "transB", 0):
        return array.T  # type: ignore[no-any-return]
    return array.reshape(-1, array.shape[-1])  # type: ignore[no-any-return]


def _dequantised_weights(source: SourceModel) -> dict[str, str]:
    """Return what a DequantizeLinear gives of a constant → the quantised constant."""
    return {
        node.output[0]: node.input[0]
        for node in source.nodes
        if node.op_type == "DequantizeLinear" and node.input[0] in source.weights
    }


def _weight(node: NodeProto, source: SourceModel, dequantised: dict[str, str]) -> str | None:
    position = WEIGHT_INPUT.get(node.op_type)
    if position is None or len(node.input) <= position:
        return None
    name = dequantised.get(node.input[position], node.input[position])
    tensor = source.weights.get(name)
    return name if tensor is not None and len(tensor.dims) >= 2 else None
