"""Weight similarity of layers and of models (USHER §2.4): the longest common submatrix of their weight matrices.

Interpretation of the paper: a submatrix is a block of adjacent rows and adjacent columns in their order, at possibly
different positions in the two matrices (the paper uses template matching and repositions the product, §3.4.3, which
only makes sense for blocks). Two entries are equal if they differ by at most 1e-7. The longest submatrix has the most
entries, since §2.4 divides its size by the sizes of the matrices.

Equal entries of two matrices vote for the displacement of one against the other, where a neighbour of theirs is equal
at that displacement too. A block has at most as many entries as its displacement has votes, so displacements are
searched by falling votes until none can hold a larger block. Of large matrices, and of those with too many equal
entries, a part votes, that with the rarest values, and the block is a lower bound.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import NodeProto
from scipy.optimize import linear_sum_assignment

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.source import SourceModel, number_names, whole

Mask = npt.NDArray[np.bool_]
Matrix = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]

#: Largest difference of weights treated as equal (USHER §2.4).
TOLERANCE = 1e-7
#: Most entries of a matrix that are looked up in another, and most equal entries that vote.
_MOST_LOOKED_UP, _MOST_EQUAL = 2**14, 2**20
_SEGMENT = 16  # adjacent entries that vote together, where not all do


@dataclass(frozen=True, slots=True)
class CommonBlock:
    """A block of ``rows`` × ``columns`` at (a_row, a_column) of one matrix and (b_row, b_column) of the other.

    ``exact`` is False if the search was incomplete and a larger block may exist.
    """

    rows: int
    columns: int
    a_row: int = 0
    a_column: int = 0
    b_row: int = 0
    b_column: int = 0
    exact: bool = True

    @property
    def area(self) -> int:
        """Number of entries."""
        return self.rows * self.columns


def common_blocks(
    first: Sequence[Matrix], second: Sequence[Matrix], pairs: Iterable[Pair] | None = None
) -> dict[Pair, CommonBlock]:
    """Return the longest common submatrix for pairs (position in ``first``, position in ``second``), by default all.

    Integers agree if equal; floats if they differ by at most `TOLERANCE`.
    """
    candidates = [(i, j) for i in range(len(first)) for j in range(len(second))] if pairs is None else list(pairs)
    entry_order: dict[int, Ints] = {}
    blocks = {}
    for i, j in candidates:
        if j not in entry_order:
            entry_order[j] = np.argsort(second[j], axis=None)
        blocks[i, j] = _find_block(first[i], second[j], entry_order[j])
    return blocks


def same_entries(a: Matrix, b: Matrix) -> Mask:
    """Return the mask of agreeing entries of two matrices of equal shape; NaN never agrees."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return np.equal(a, b)
    # The difference of two float32 is exact in float64, and so is the comparison.
    difference = np.subtract(a, b, dtype=np.float64)
    return np.less_equal(np.abs(difference), TOLERANCE)


def largest_rectangle(mask: Mask) -> tuple[int, int, int, int]:
    """Return (row, column, rows, columns) of the all-true rectangle with the most entries; the topmost of equal ones.

    State per column, updated row by row: the height of the run of true entries above, and the left and right ends of
    the widest rectangle of that height. Each row costs a few vector operations.
    """
    rows, columns = mask.shape
    if mask.all():
        return 0, 0, rows, columns
    position = np.arange(columns)
    height = np.zeros(columns, np.int64)
    left, right = np.zeros(columns, np.int64), np.full(columns, columns, np.int64)
    best, largest_area = (0, 0, 0, 0), 0
    for row in range(rows):
        is_equal = mask[row]
        height = np.where(is_equal, height + 1, 0)
        first = np.maximum.accumulate(np.where(is_equal, 0, position + 1))
        last = np.minimum.accumulate(np.where(is_equal, columns, position)[::-1])[::-1]
        left = np.where(is_equal, np.maximum(left, first), 0)
        right = np.where(is_equal, np.minimum(right, last), columns)
        area = np.where(is_equal, height * (right - left), 0)
        at = int(area.argmax())
        if area[at] > largest_area:
            largest_area, tall = int(area[at]), int(height[at])
            best = row - tall + 1, int(left[at]), tall, int(right[at] - left[at])
    return best


def _find_block(a: Matrix, b: Matrix, b_order: Ints) -> CommonBlock:
    if not a.size or not b.size:
        return CommonBlock(0, 0)
    best = _block_at(a, b, 0, 0) if a.shape == b.shape else CommonBlock(0, 0)
    most_possible = min(a.shape[0], b.shape[0]) * min(a.shape[1], b.shape[1])
    if best.area == most_possible:
        return best
    ahead, behind, is_sample = _find_equal(a, b, b_order)
    if len(ahead) and not best.area:
        best = CommonBlock(1, 1, *divmod(int(ahead[0]), a.shape[1]), *divmod(int(behind[0]), b.shape[1]))
    down, right = behind // b.shape[1] - ahead // a.shape[1], behind % b.shape[1] - ahead % a.shape[1]
    width = a.shape[1] + b.shape[1]
    places = (down + a.shape[0]) * width + right + a.shape[1]
    keys, votes = np.unique(places[_have_neighbours(places * a.size + ahead, a.shape[1])], return_counts=True)
    order = np.argsort(-votes, kind="stable")
    most = _SEGMENT if is_sample else _MOST_EQUAL // a.size
    for at in order[:most]:
        if votes[at] <= best.area and not is_sample:
            return best
        row, column = divmod(int(keys[at]), width)
        block = _block_at(a, b, row - a.shape[0], column - a.shape[1])
        best = block if block.area > best.area else best
        if best.area == most_possible:
            return best
    return replace(best, exact=not is_sample and len(order) <= most)


def _find_equal(a: Matrix, b: Matrix, b_order: Ints) -> tuple[Ints, Ints, bool]:
    """Return the positions of equal entries in ``a`` and in ``b``, and whether the list is incomplete."""
    kind = np.int64 if a.dtype.kind in "iub" and b.dtype.kind in "iub" else np.float64
    stride = -(-a.size // _MOST_LOOKED_UP)
    places = np.flatnonzero(np.arange(a.size) // _SEGMENT % stride == 0)
    queries, targets = a.ravel()[places].astype(kind), b.ravel()[b_order].astype(kind)
    reach = 0 if kind is np.int64 else TOLERANCE * (1.0 + 1e-6)  # no equal entry may be lost by rounding
    begin = np.searchsorted(targets, queries - reach)
    count = np.searchsorted(targets, queries + reach, side="right") - begin
    count[~np.isfinite(queries)] = 0
    matches = np.flatnonzero(count)
    is_sample = stride > 1 or int(count.sum()) > _MOST_EQUAL
    if int(count.sum()) > _MOST_EQUAL:
        totals = np.add.reduceat(count, np.arange(0, len(count), _SEGMENT))
        rarest = np.argsort(totals, kind="stable")
        rarest = rarest[totals[rarest] > 0]
        kept = rarest[: max(1, int(np.searchsorted(np.cumsum(totals[rarest]), _MOST_EQUAL)))]
        matches = matches[np.isin(matches // _SEGMENT, kept)]
    begin, count = begin[matches], count[matches]
    ahead = np.repeat(places[matches], count)
    behind = b_order[np.repeat(begin - np.cumsum(count) + count, count) + np.arange(len(ahead))]
    return ahead, behind, is_sample


def _have_neighbours(points: Ints, columns: int) -> Mask:
    """Return which points, numbered by displacement and entry, have a neighbouring point in their row or column."""
    return np.isin(points, np.concatenate([points + step for step in (-1, 1, -columns, columns)]))


def _block_at(a: Matrix, b: Matrix, down: int, right: int) -> CommonBlock:
    """Return the largest common block if row r of ``a`` is aligned with row r + down of ``b``, columns likewise."""
    row, column = max(0, -down), max(0, -right)
    part_a = a[row : b.shape[0] - down, column : b.shape[1] - right]
    part_b = b[row + down : row + down + part_a.shape[0], column + right : column + right + part_a.shape[1]]
    top, left, rows, columns = largest_rectangle(same_entries(part_a, part_b))
    if not rows:
        return CommonBlock(0, 0)
    top, left = row + top, column + left
    return CommonBlock(rows, columns, top, left, top + down, left + right)


_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "Attention", "FusedMatMul"}
_CONVOLUTIONS = {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv"}


class Moment(NamedTuple):
    """The start time of a node: number of weighted operators before it, then number of other ops since the last.

    The paper's start times (§3.2) come from kernel durations. Here every weighted operator takes a unit of time and
    other ops almost none, so that the same layer of two models starts at the same time even if their other ops differ a
    little. Moments grow along every edge of a graph, so merging nodes of equal moments never forms a cycle.
    """

    level: int
    depth: float


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
    """Return the weights of an op that are shared entirely or not: lookup tables and weights of recurrent ops.

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


Grid = npt.NDArray[np.float64]

#: Characters for similarities from 0, 1/4, 1/2, 3/4, and of 1.
SHADES = "·░▒▓█"


@dataclass(frozen=True, slots=True)
class LayerSimilarity:
    """The similarity of two layers."""

    #: ``first``, ``second``: Names of the operators.
    first: str
    second: str
    kind: str  #: "conv" or "matmul".
    block: CommonBlock  #: The longest common submatrix.
    #: 2 × entries of the block / entries of both matrices, in [0, 1]; a lower bound if the block is not exact.
    similarity: float


@dataclass(frozen=True, slots=True)
class ModelSimilarity:
    """The similarity of two models."""

    first: str
    second: str
    layers: tuple[LayerSimilarity, ...]  #: Every pair of layers of the same kind, in the order of the layers.
    #: Mean over all pairs of layers, the definition of §2.4; about 1/n for a model with n different layers and itself.
    #: None without a pair.
    all_pairs: float | None
    #: Mean over the layers of the smaller model, each with its partner in the best bijective matching (0 without a
    #: partner): the mergeable part; 1 for a model and itself.
    matched: float | None
    exact: bool  #: False if some layer's similarity is a lower bound.


def block_similarity(area: int, first: int, second: int) -> float:
    """Return 2 × ``area`` / (``first`` + ``second``): the similarity of matrices of these sizes (§2.4)."""
    return 2.0 * area / (first + second) if first + second else 0.0


def compare_models(first: SourceModel, second: SourceModel) -> ModelSimilarity:
    """Return the weight similarity of two normalised models: convolutions with convolutions, products with products."""
    first_ops, second_ops = weighted_operators(first), weighted_operators(second)
    first_matrices = [weight_matrix(first, operator) for operator in first_ops]
    second_matrices = [weight_matrix(second, operator) for operator in second_ops]
    pairs = [(i, j) for i, a in enumerate(first_ops) for j, b in enumerate(second_ops) if a.kind == b.kind]
    blocks = common_blocks(first_matrices, second_matrices, pairs)
    rows, columns = (number_names([operator.name for operator in side], "{} ({})") for side in (first_ops, second_ops))
    layers = [
        LayerSimilarity(
            rows[i],
            columns[j],
            first_ops[i].kind,
            blocks[i, j],
            block_similarity(blocks[i, j].area, first_matrices[i].size, second_matrices[j].size),
        )
        for i, j in pairs
    ]
    similarities = {pair: layer.similarity for pair, layer in zip(pairs, layers, strict=True)}
    return ModelSimilarity(
        first.name,
        second.name,
        tuple(layers),
        sum(similarities.values()) / len(similarities) if similarities else None,
        _matched_similarity(similarities, first_ops, second_ops),
        all(layer.block.exact for layer in layers),
    )


def best_matching(similarities: Mapping[tuple[int, int], float]) -> dict[int, int]:
    """Return the matching left → right with the largest sum of similarities, by the Hungarian algorithm.

    ``similarities``: weight of each edge, above 0; pairs without an edge are absent and never matched.
    """
    lefts = sorted({left for left, _ in similarities})
    rights = sorted({right for _, right in similarities})
    if not lefts:
        return {}
    row = {left: i for i, left in enumerate(lefts)}
    column = {right: j for j, right in enumerate(rights)}
    weights = np.zeros((len(lefts), len(rights)))
    for (left, right), similarity in similarities.items():
        weights[row[left], column[right]] = similarity
    matching = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
    return {lefts[i]: rights[j] for i, j in matching if (lefts[i], rights[j]) in similarities}


def similarity_grid(similarity: ModelSimilarity, kind: str) -> tuple[list[str], list[str], Grid]:
    """Return (layers of the first model, layers of the second, similarities of shape (first, second)) of a kind."""
    layers = [layer for layer in similarity.layers if layer.kind == kind]
    rows = list(dict.fromkeys(layer.first for layer in layers))
    columns = list(dict.fromkeys(layer.second for layer in layers))
    grid = np.zeros((len(rows), len(columns)))
    at_row, at_column = ({name: i for i, name in enumerate(names)} for names in (rows, columns))
    for layer in layers:
        grid[at_row[layer.first], at_column[layer.second]] = layer.similarity
    return rows, columns, grid


def text_map(similarity: ModelSimilarity) -> list[str]:
    """Return the lines of a map for a terminal; in large maps a character is the maximum of a square of layers."""
    lines = []
    width = shutil.get_terminal_size().columns - len("  ")
    for kind in sorted({layer.kind for layer in similarity.layers}):
        rows, columns, grid = similarity_grid(similarity, kind)
        step = -(-len(columns) // width)
        scale = f", {step} × {step} layers a character" if step > 1 else ""
        lines.append(
            f"{kind}: {len(rows)} layers of {similarity.first} (down) × {len(columns)} of {similarity.second}{scale}"
        )
        for i in range(0, len(rows), step):
            cells = [grid[i : i + step, j : j + step].max() for j in range(0, len(columns), step)]
            lines.append("  " + "".join(SHADES[int(4 * value)] for value in cells))
    if lines:
        lines.append("  ".join(f"{shade} from {part / 4:g}" for part, shade in enumerate(SHADES)))
    return lines


def _matched_similarity(
    scored: dict[tuple[int, int], float], first_ops: Sequence[WeightedOperator], second_ops: Sequence[WeightedOperator]
) -> float | None:
    if not scored:
        return None
    matching = best_matching({pair: score for pair, score in scored.items() if score > 0})
    return sum(scored[pair] for pair in matching.items()) / min(len(first_ops), len(second_ops))
