"""Weight similarity of layers and of models as USHER §2.4 defines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.merging.common import TOLERANCE, CommonBlock, common_blocks
from gpuprof.merging.matching import best_matching
from gpuprof.merging.operators import WeightedOperator, weight_matrix, weighted_operators
from gpuprof.merging.source import SourceModel, number_names


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
    of_first, of_second = weighted_operators(first), weighted_operators(second)
    mine = [weight_matrix(first, operator) for operator in of_first]
    theirs = [weight_matrix(second, operator) for operator in of_second]
    pairs = [(i, j) for i, a in enumerate(of_first) for j, b in enumerate(of_second) if a.kind == b.kind]
    blocks = common_blocks(mine, theirs, pairs, tolerance)
    rows, columns = (number_names([operator.name for operator in side], "{} ({})") for side in (of_first, of_second))
    layers = [
        LayerSimilarity(
            rows[i],
            columns[j],
            of_first[i].kind,
            (mine[i].shape[0], mine[i].shape[1]),
            (theirs[j].shape[0], theirs[j].shape[1]),
            blocks[i, j],
            block_similarity(blocks[i, j].area, mine[i].size, theirs[j].size),
        )
        for i, j in pairs
    ]
    scored = {pair: layer.similarity for pair, layer in zip(pairs, layers, strict=True)}
    return ModelSimilarity(
        first.name,
        second.name,
        tuple(layers),
        sum(scored.values()) / len(scored) if scored else None,
        _matched_similarity(scored, of_first, of_second),
        all(layer.block.exact for layer in layers),
    )


def _matched_similarity(
    scored: dict[tuple[int, int], float], of_first: Sequence[WeightedOperator], of_second: Sequence[WeightedOperator]
) -> float | None:
    if not scored:
        return None
    chosen = best_matching({pair: score for pair, score in scored.items() if score > 0})
    return sum(scored[pair] for pair in chosen.items()) / min(len(of_first), len(of_second))
