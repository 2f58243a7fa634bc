"""Compares the weights of models: how many they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.merging.pipeline import read_weights
from gpuprof.merging.similarity import ModelSimilarity, compare_models, similarity_grid
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.reporting.chart import Chart
from gpuprof.reporting.heat_map import heat_map as draw_heat_map
from gpuprof.reporting.heat_map import heat_scale
from gpuprof.reporting.picture import check_picture, write_picture


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

    def layer_rows(self, most: int = 0) -> Sequence[Mapping[str, object]]:
        """Return a row for each of the ``most`` best-matching pairs of layers of each pair of models; 0: all pairs."""
        return [row for pair in self.pairs for row in _layer_rows(pair, most)]


def similarity(
    models: Sequence[PathArgument],
    *,
    tolerance: float = 1e-7,
    heat_map: PathArgument | None = None,
    progress: ProgressCallback = say_nothing,
) -> SimilarityResult:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4).

    Parameters
    ----------
    models : sequence of path
        Two or more ONNX files.
    tolerance : float
        Largest difference of weights that are treated as equal.
    heat_map : path, optional
        File for the heat maps of layers, ``.svg`` or ``.png``.
    progress : callable, optional
        Called after each pair of models.

    Raises
    ------
    InputError
        For fewer than two models, a tolerance outside (0, 1), or a file that cannot be read or written.

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
    if not 0.0 < tolerance < 1.0:
        raise InputError(f"--tolerance must be above 0 and below 1 but is {tolerance:g}")
    if heat_map is not None:
        check_picture(Path(heat_map))
    sources = read_weights([Path(model) for model in models])
    index_pairs = list(combinations(range(len(sources)), 2))
    pairs: list[ModelSimilarity] = []
    progress(Progress("comparing", 0, len(index_pairs)))
    for i, j in index_pairs:
        pairs.append(compare_models(sources[i], sources[j], tolerance))
        progress(Progress("comparing", len(pairs), len(index_pairs)))
    if heat_map is not None:
        write_picture(_draw_heat_maps(pairs), Path(heat_map))
    return SimilarityResult(pairs=tuple(pairs))


def _draw_heat_maps(pairs: Sequence[ModelSimilarity]) -> list[Chart]:
    """Return the scale of the colours, and a map for each pair of models and kind of layers."""
    label = "entries of their longest common submatrix, as a part of the entries of both: 0 none, 1 the same"
    charts = [heat_scale("Similarity of two layers", label)]
    for pair in pairs:
        for kind in sorted({layer.kind for layer in pair.layers}):
            rows, columns, grid = similarity_grid(pair, kind)
            title = f"{kind}: layers of {pair.first} (down) × {pair.second} (across), in the order they run"
            charts.append(draw_heat_map(title, rows, columns, grid))
    return charts


def _layer_rows(pair: ModelSimilarity, most: int) -> list[dict[str, object]]:
    ordered = sorted(pair.layers, key=lambda layer: -layer.similarity)
    return [
        {
            "first": f"{pair.first}/{layer.first}",
            "second": f"{pair.second}/{layer.second}",
            "kind": layer.kind,
            "common": f"{'' if layer.block.exact else '≥ '}{layer.block.rows}×{layer.block.columns}",
            "first_at": [layer.block.a_row, layer.block.a_column],
            "second_at": [layer.block.b_row, layer.block.b_column],
            "first_shape": "×".join(map(str, layer.first_shape)),
            "second_shape": "×".join(map(str, layer.second_shape)),
            "similarity": layer.similarity,
            "exact": layer.block.exact,
        }
        for layer in (ordered[:most] if most else ordered)
    ]
