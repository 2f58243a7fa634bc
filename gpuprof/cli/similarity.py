"""``gpuprof similarity``: how many weights models have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.options import NetworksArgument
from gpuprof.cli.output import Column, ColumnRole, Format, print_rows, show_progress
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.merging.similarity import ModelSimilarity

_MODELS = (
    Column("first", "model", right=False, role=ColumnRole.SUBJECT),
    Column("second", "compared with", right=False, role=ColumnRole.KEY),
    Column("layers", "pairs of layers", number_formatter()),
    Column("all_pairs", "mean of all pairs", number_formatter()),
    Column("matched", "mean of the best matching", number_formatter()),
    Column("exact", "exact", lambda value: "yes" if value else "≥", right=False),
)
_LAYERS = (
    Column("first", "layer", right=False, role=ColumnRole.SUBJECT),
    Column("second", "layer", right=False, role=ColumnRole.KEY),
    Column("kind", "kind", right=False),
    Column("common", "common block", right=False),
    Column("first_shape", "of", right=False),
    Column("second_shape", "and", right=False),
    Column("similarity", "similarity", number_formatter()),
)


def similarity(
    models: NetworksArgument,
    layers: Annotated[bool, typer.Option("--layers", help="List the pairs of layers that share most.")] = False,
    top: Annotated[int, typer.Option(help="Pairs of layers that --layers lists; 0 lists all.")] = 20,
    tolerance: Annotated[float, typer.Option(help="Largest difference of weights that count as the same.")] = 1e-7,
    heat_map: Annotated[
        Path | None, typer.Option(help="Write the heat map of layers into this .svg or .png file.")
    ] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4)."""
    from gpuprof.pipeline.similarity import similarity as compare

    if top < 0:
        raise InputError(f"--top cannot be negative but is {top}", "0 lists all")
    with show_progress() as show:
        result = compare(models, tolerance=tolerance, heat_map=heat_map, progress=show)
    if layers:
        print_rows(result.layer_rows(top), _LAYERS, chosen)
    else:
        print_rows(result.rows(), _MODELS, chosen)
    if chosen is Format.TABLE and not layers:
        _print_maps(result.pairs)


def _print_maps(pairs: Sequence[ModelSimilarity]) -> None:
    from gpuprof.merging.similarity import text_map

    for pair in pairs:
        for line in text_map(pair):
            typer.echo(line)
