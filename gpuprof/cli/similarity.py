"""``gpuprof similarity``: how many weights models have in common."""

from __future__ import annotations

import typer

from gpuprof.cli.options import NetworksArgument
from gpuprof.cli.output import Column, ColumnRole, Format, print_rows, show_progress
from gpuprof.domain.number_format import number_formatter

_MODELS = (
    Column("first", "model", right=False, role=ColumnRole.SUBJECT),
    Column("second", "compared with", right=False, role=ColumnRole.KEY),
    Column("layers", "pairs of layers", number_formatter()),
    Column("all_pairs", "mean of all pairs", number_formatter()),
    Column("matched", "mean of the best matching", number_formatter()),
    Column("exact", "exact", lambda value: "yes" if value else "≥", right=False),
)


def similarity(models: NetworksArgument, chosen: Format = Format.TABLE) -> None:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4)."""
    from gpuprof.merging.similarity import text_map
    from gpuprof.pipeline.similarity import similarity as compare

    with show_progress() as show:
        result = compare(models, progress=show)
    print_rows(result.rows(), _MODELS, chosen)
    if chosen is Format.TABLE:
        for pair in result.pairs:
            for line in text_map(pair):
                typer.echo(line)
