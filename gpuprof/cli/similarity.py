"""``gpuprof similarity``: how many weights models have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, number, print_rows, progress
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.merging.similarity import ModelSimilarity

_MODELS = (
    Column("first", "model", right=False),
    Column("second", "model", right=False),
    Column("layers", "pairs of layers"),
    Column("all_pairs", "mean of all pairs", number()),
    Column("matched", "mean of the best matching", number()),
    Column("exact", "exact", lambda value: "yes" if value else "≥", right=False),
)
_LAYERS = (
    Column("first", "layer", right=False),
    Column("second", "layer", right=False),
    Column("kind", "kind", right=False),
    Column("common", "common block", right=False),
    Column("first_shape", "of", right=False),
    Column("second_shape", "and", right=False),
    Column("similarity", "similarity", number()),
)


def similarity(
    models: Annotated[list[Path], typer.Argument(help="Two or more ONNX files.")],
    layers: Annotated[bool, typer.Option("--layers", help="List the pairs of layers that share most.")] = False,
    top: Annotated[int, typer.Option(help="How many pairs of layers --layers lists; 0: all.")] = 20,
    tolerance: Annotated[float, typer.Option(help="Weights that differ by no more are the same.")] = 1e-7,
    heat_map: Annotated[Path | None, typer.Option(help="Write the heat map of layers as SVG.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4)."""
    from itertools import combinations

    from gpuprof.merging.heat_map import check_target, write_heat_maps
    from gpuprof.merging.pipeline import read_weights
    from gpuprof.merging.similarity import compare_models

    chosen = chosen_format(as_json, as_csv)
    _check(models, tolerance, top)
    if heat_map is not None:
        check_target(heat_map)
    sources = read_weights(models)
    pairs = list(combinations(range(len(sources)), 2))
    found = []
    with progress() as bar:
        task = bar.add_task("comparing", total=len(pairs))
        for i, j in pairs:
            found.append(compare_models(sources[i], sources[j], tolerance))
            bar.advance(task)
    if layers:
        print_rows([row for one in found for row in _layer_rows(one, top)], _LAYERS, chosen)
    else:
        print_rows([_model_row(one) for one in found], _MODELS, chosen)
    if chosen is Format.TABLE and not layers:
        _print_maps(found)
    if heat_map is not None:
        write_heat_maps(found, heat_map)


def _check(models: list[Path], tolerance: float, top: int) -> None:
    if len(models) < 2:
        raise InputError("similarity takes at least two models but got one", "gpuprof similarity A.onnx B.onnx")
    if not 0.0 < tolerance < 1.0:
        raise InputError(f"--tolerance must be above 0 and below 1 but is {tolerance:g}")
    if top < 0:
        raise InputError(f"--top cannot be negative but is {top}")


def _model_row(one: ModelSimilarity) -> dict[str, object]:
    return {
        "first": one.first,
        "second": one.second,
        "layers": len(one.layers),
        "all_pairs": one.all_pairs,
        "matched": one.matched,
        "exact": one.exact,
    }


def _layer_rows(one: ModelSimilarity, top: int) -> list[dict[str, object]]:
    ordered = sorted(one.layers, key=lambda layer: -layer.similarity)
    return [
        {
            "first": f"{one.first}/{layer.first}",
            "second": f"{one.second}/{layer.second}",
            "kind": layer.kind,
            "common": f"{'' if layer.block.exact else '≥ '}{layer.block.rows}×{layer.block.columns}",
            "first_at": [layer.block.a_row, layer.block.a_column],
            "second_at": [layer.block.b_row, layer.block.b_column],
            "first_shape": "×".join(map(str, layer.first_shape)),
            "second_shape": "×".join(map(str, layer.second_shape)),
            "similarity": layer.similarity,
            "exact": layer.block.exact,
        }
        for layer in (ordered[:top] if top else ordered)
    ]


def _print_maps(found: list[ModelSimilarity]) -> None:
    from gpuprof.merging.heat_map import text_map

    for one in found:
        for line in text_map(one):
            typer.echo(line)
