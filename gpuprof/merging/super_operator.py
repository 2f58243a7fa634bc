"""The Super-Operator (USHER §3.4.3): operators that share only a part of their weights.

The largest common submatrix A of the weights is multiplied once with the inputs of all models. Each model multiplies
the rest of its weights alone, and both results are joined at A's position in that model's weights (the repositioning).

The paper keeps W^s and each W^R at full size, padded with zeros, which helps the cache but adds as many multiplications
as are shared and holds more weights than before. Here A, the rest and the inputs are cut into rectangles without zeros,
so no multiplication is done twice, and the paper's padding of operators of different sizes is unnecessary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gpuprof.merging.batch_rules import UnmergeableError
from gpuprof.merging.common import CommonBlock, common_blocks
from gpuprof.merging.groups import NodeGroup
from gpuprof.merging.normalisation import attribute, whole
from gpuprof.merging.operators import WEIGHT_INPUT, weight_matrix
from gpuprof.merging.source import Array, SourceModel

_DIVISIBLE = {"MatMul", "Gemm", "Conv"}


@dataclass(frozen=True, slots=True)
class SuperOperator:
    """The shared block of several weighted operators."""

    #: ``inputs``, ``outputs``: Input features (channels) and output features (filters) of the shared block.
    inputs: int
    outputs: int
    places: dict[int, tuple[int, int]]  #: Model → first input and first output feature of the block.
    totals: dict[int, tuple[int, int]]  #: Model → numbers of its input and output features.

    def takes_all(self, model: int) -> bool:
        """Return whether the block spans all input features of a model."""
        return self.totals[model][0] == self.inputs

    def is_complete(self, model: int) -> bool:
        """Return whether the block spans all output features of a model."""
        return self.totals[model][1] == self.outputs


@dataclass(frozen=True, slots=True)
class WeightView:
    """A weight indexed by (input feature, output feature), regardless of the op's layout."""

    data: Array  #: Shape (inputs, outputs) for products, (filters, channels, …) for convolutions.
    is_conv: bool

    @property
    def features(self) -> tuple[int, int]:
        """Numbers of input and output features."""
        first, second = self.data.shape[:2]
        return (second, first) if self.is_conv else (first, second)

    @property
    def per_feature(self) -> int:
        """Number of entries per pair of an input and an output feature."""
        return prod(self.data.shape[2:])

    def part(self, inputs: Array, outputs: Array) -> Array:
        """Return the weight between chosen input and output features."""
        rows, columns = (outputs, inputs) if self.is_conv else (inputs, outputs)
        return np.ascontiguousarray(self.data[rows][:, columns])


def view_weight(source: SourceModel, group: NodeGroup, model: int) -> WeightView:
    """Return the weight of a group's member, a Gemm's in MatMul's layout."""
    operator = group.operators[model]
    if operator.kind == "conv":
        return WeightView(source.array(operator.weight), True)
    return WeightView(weight_matrix(source, operator), False)


def bias_of(group: NodeGroup, model: int) -> str | None:
    """Return the name of the operator's bias; None without a bias."""
    node = group.operators[model].node
    return node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 and node.input[2] else None


def plan_super_operator(sources: Sequence[SourceModel], group: NodeGroup) -> SuperOperator:
    """Return the shared block of the members of ``group``.

    The block of the first two models is compared with the weights of each further model, as the paper merges each
    operator of a Super-Operator with the next; the residuals stay apart. Raises `UnmergeableError` when the op cannot
    be divided, or the common block does not cover whole features.
    """
    _check_divisible(sources, group)
    models = sorted(group.operators)
    views = {m: view_weight(sources[m], group, m) for m in models}
    first, second = models[:2]
    block = group.blocks[first, second]
    corners = {first: (block.a_row, block.a_column), second: (block.b_row, block.b_column)}
    for model in models[2:]:
        block, corners = _narrow_block(sources, group, block, corners, model)
    return _in_features(block, corners, views)


def _check_divisible(sources: Sequence[SourceModel], group: NodeGroup) -> None:
    for model, operator in group.operators.items():
        node, source = operator.node, sources[model]
        scaled = node.op_type == "Gemm" and (
            attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0 or whole(node, "transA", 0)
        )
        direct = node.input[WEIGHT_INPUT[node.op_type]] == operator.weight
        plain = source.array(operator.weight).dtype.kind == "f" and direct and not node.domain
        if node.op_type not in _DIVISIBLE or scaled or not plain or whole(node, "group", 1) != 1:
            raise UnmergeableError(f"its weights or other constants differ, and this {node.op_type} cannot be divided")
        if node.op_type != "Conv" and len(source.weights[operator.weight].dims) != 2:
            raise UnmergeableError("its weights differ, and a product of many matrices cannot be divided")
        bias = bias_of(group, model)
        if bias is not None and bias not in source.weights:
            raise UnmergeableError("it adds something computed")


def _narrow_block(
    sources: Sequence[SourceModel],
    group: NodeGroup,
    block: CommonBlock,
    corners: dict[int, tuple[int, int]],
    model: int,
) -> tuple[CommonBlock, dict[int, tuple[int, int]]]:
    """Return the part of the block that also occurs in ``model``'s weight, and its corners."""
    anchor = min(corners)
    row, column = corners[anchor]
    whole_weight = weight_matrix(sources[anchor], group.operators[anchor])
    shared = whole_weight[row : row + block.rows, column : column + block.columns]
    found = common_blocks([shared], [weight_matrix(sources[model], group.operators[model])])[0, 0]
    moved = {m: (r + found.a_row, c + found.a_column) for m, (r, c) in corners.items()}
    return found, moved | {model: (found.b_row, found.b_column)}


def _in_features(
    block: CommonBlock, corners: dict[int, tuple[int, int]], views: dict[int, WeightView]
) -> SuperOperator:
    is_conv = next(iter(views.values())).is_conv
    totals = {m: view.features for m, view in views.items()}
    if not is_conv:
        _check_worth(block.area)
        return SuperOperator(block.rows, block.columns, corners, totals)
    # A convolution's matrix has a row per filter, and columns channel by channel, each with its window. A block may
    # begin or end within a window; only whole channels can be cut out.
    kernels = {view.data.shape[2:] for view in views.values()}
    per = next(iter(views.values())).per_feature
    skips = {-column % per for _, column in corners.values()}
    if len(kernels) > 1 or len(skips) > 1:
        raise UnmergeableError("what it shares lies at different places within the filters")
    skip = skips.pop()
    channels = (block.columns - skip) // per
    _check_worth(block.rows * channels)
    places = {m: ((column + skip) // per, row) for m, (row, column) in corners.items()}
    return SuperOperator(channels, block.rows, places, totals)


def _check_worth(area: int) -> None:
    if area <= 0:
        raise UnmergeableError("it shares no whole feature")
