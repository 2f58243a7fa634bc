"""Weight similarity of layers and of models as USHER §2.4 defines it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from gpuprof.merging.common import TOLERANCE, CommonBlock, common_blocks
from gpuprof.merging.operators import WeightedOperator, weight_matrix, weighted_operators
from gpuprof.merging.source import SourceModel, number_names

Grid = npt.NDArray[np.float64]

#: Operators less similar than this are not merged (the paper's ω, its figure 26b).
OMEGA = 0.4
#: Characters for similarities from 0, 1/4, 1/2, 3/4, and of 1.
SHADES = "·░▒▓█"


@dataclass(frozen=True, slots=True)
class LayerSimilarity:
    """The similarity of two layers."""

    #: ``first``, ``second``: Names of the operators.
    first: str
    second: str
    kind: str  #: "conv" or "matmul".
    #: ``first_shape``, ``second_shape``: Shapes of the weight matrices.
    first_shape: tuple[int, int]
    second_shape: tuple[int, int]
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


def compare_models(first: SourceModel, second: SourceModel, tolerance: float = TOLERANCE) -> ModelSimilarity:
    """Return the weight similarity of two normalised models: convolutions with convolutions, products with products.

    ``tolerance``: largest difference of weights treated as equal.
    """
    first_ops, second_ops = weighted_operators(first), weighted_operators(second)
    first_matrices = [weight_matrix(first, operator) for operator in first_ops]
    second_matrices = [weight_matrix(second, operator) for operator in second_ops]
    pairs = [(i, j) for i, a in enumerate(first_ops) for j, b in enumerate(second_ops) if a.kind == b.kind]
    blocks = common_blocks(first_matrices, second_matrices, pairs, tolerance)
    rows, columns = (number_names([operator.name for operator in side], "{} ({})") for side in (first_ops, second_ops))
    layers = [
        LayerSimilarity(
            rows[i],
            columns[j],
            first_ops[i].kind,
            (first_matrices[i].shape[0], first_matrices[i].shape[1]),
            (second_matrices[j].shape[0], second_matrices[j].shape[1]),
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
