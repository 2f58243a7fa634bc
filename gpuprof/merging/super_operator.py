"""The Super-Operator (USHER §3.4.3): operators that share only a part of their weights.

The weights of output features that all models have are multiplied once with the inputs of all models. Each model
multiplies the rest of its weights alone, and both results are joined in the order of that model's output features (the
repositioning).

The paper keeps W^s and each W^R at full size, padded with zeros, which helps the cache but adds as many multiplications
as are shared and holds more weights than before. Here the weights are divided between output features, so no
multiplication is done twice, and the paper's padding of operators of different sizes is unnecessary. A common block
that lacks some of the input features is not shared: cutting inputs and adding products costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.merging.groups import NodeGroup
from gpuprof.merging.normalisation import attribute, whole
from gpuprof.merging.operators import WeightedOperator, weight_matrix
from gpuprof.merging.source import Array, SourceModel


class UnmergeableError(Exception):
    """Raised when an op cannot run once for several models; the message, the reason, is part of the report."""


@dataclass(frozen=True, slots=True)
class SuperOperator:
    """The common output features (filters) of several weighted operators."""

    outputs: int  #: Number of common output features.
    begins: dict[int, int]  #: Model → its first common output feature.
    totals: dict[int, int]  #: Model → number of its output features.
    shared_bytes: int  #: Weights of the common output features.

    def is_complete(self, model: int) -> bool:
        """Return whether all output features of a model are common."""
        return self.totals[model] == self.outputs


def bias_of(group: NodeGroup, model: int) -> str | None:
    """Return the name of the operator's bias; None without a bias."""
    node = group.operators[model].node
    return node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 and node.input[2] else None


def weight_part(source: SourceModel, operator: WeightedOperator, begin: int, end: int) -> Array:
    """Return the weight of some output features, a Gemm's in MatMul's layout."""
    if operator.kind == "conv":
        return source.array(operator.weight)[begin:end]
    return weight_matrix(source, operator)[:, begin:end]


def plan_super_operator(sources: Sequence[SourceModel], group: NodeGroup) -> SuperOperator:
    """Return the common output features of the members of ``group``.

    Raises `UnmergeableError` when the op cannot be divided, or the common block does not cover whole output features.
    """
    _check_divisible(sources, group)
    first, *later_models = sorted(group.operators)
    is_conv = group.operators[first].kind == "conv"
    shapes = {m: weight_matrix(sources[m], operator).shape for m, operator in group.operators.items()}
    totals = {m: shape[0] if is_conv else shape[1] for m, shape in shapes.items()}
    low, high, shifts = 0, totals[first], {first: 0}
    for model in later_models:
        block = group.blocks[first, model]
        inputs = {shapes[m][1] if is_conv else shapes[m][0] for m in (first, model)}
        if inputs != {block.columns if is_conv else block.rows}:
            raise UnmergeableError("it shares no whole feature")
        begin, count = (block.a_row, block.rows) if is_conv else (block.a_column, block.columns)
        low, high = max(low, begin), min(high, begin + count)
        shifts[model] = (block.b_row - block.a_row) if is_conv else (block.b_column - block.a_column)
    if high <= low:
        raise UnmergeableError("it shares no whole feature")
    shared_bytes = weight_part(sources[first], group.operators[first], low, high).nbytes
    return SuperOperator(high - low, {m: low + shift for m, shift in shifts.items()}, totals, shared_bytes)


def _check_divisible(sources: Sequence[SourceModel], group: NodeGroup) -> None:
    for model, operator in group.operators.items():
        node, source = operator.node, sources[model]
        is_scaled = node.op_type == "Gemm" and (
            attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0 or whole(node, "transA", 0)
        )
        direct = operator.weight in node.input  # not behind a DequantizeLinear
        plain = source.array(operator.weight).dtype.kind == "f" and direct and not node.domain
        if node.op_type not in ("MatMul", "Gemm", "Conv") or is_scaled or not plain or whole(node, "group", 1) != 1:
            raise UnmergeableError(f"its weights or other constants differ, and this {node.op_type} cannot be divided")
        if node.op_type != "Conv" and len(source.weights[operator.weight].dims) != 2:
            raise UnmergeableError("its weights differ, and a product of many matrices cannot be divided")
        bias = bias_of(group, model)
        if bias is not None and bias not in source.weights:
            raise UnmergeableError("it adds something computed")
    kernels = {tuple(sources[m].weights[operator.weight].dims[2:]) for m, operator in group.operators.items()}
    if len(kernels) > 1:
        raise UnmergeableError("its weights have different kernels")
