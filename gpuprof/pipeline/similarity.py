"""Compares the weights of models: how many they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.merging.pipeline import read_weights
from gpuprof.merging.similarity import ModelSimilarity, compare_models
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing


@dataclass(frozen=True, kw_only=True)
class SimilarityResult(Result):
    """The similarity of the weights of each pair of models."""

    pairs: tuple[ModelSimilarity, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each pair of models."""
        return [
            {
                "first": pair.first,
                "second": pair.second,
                "layers": len(pair.layers),
                "all_pairs": pair.all_pairs,
                "matched": pair.matched,
                "exact": pair.exact,
            }
            for pair in self.pairs
        ]


def similarity(models: Sequence[PathArgument], *, progress: ProgressCallback = say_nothing) -> SimilarityResult:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4).

    Parameters
    ----------
    models : sequence of path
        Two or more ONNX files.
    progress : callable, optional
        Called after each pair of models.

    Raises
    ------
    InputError
        For fewer than two models, or a file that cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> folder = Path(tempfile.mkdtemp())
    >>> files = [gpuprof.build_model("random_mlp", folder / f"{name}.onnx") for name in ("one", "other")]
    >>> gpuprof.similarity(files).to_frame()["matched"].tolist()
    [1.0]
    """
    if len(models) < 2:
        raise InputError("similarity takes at least two models but got one", "gpuprof similarity A.onnx B.onnx")
    sources = read_weights([Path(model) for model in models])
    index_pairs = list(combinations(range(len(sources)), 2))
    pairs: list[ModelSimilarity] = []
    progress(Progress("comparing", 0, len(index_pairs)))
    for i, j in index_pairs:
        pairs.append(compare_models(sources[i], sources[j]))
        progress(Progress("comparing", len(pairs), len(index_pairs)))
    return SimilarityResult(pairs=tuple(pairs))
