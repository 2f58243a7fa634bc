"""``gpuprof similarity``: how many weights models have in common."""

from __future__ import annotations

import typer

from gpuprof.cli.options import NetworksArgument
from gpuprof.cli.output import Format, make_columns, print_rows, show_progress

_MODELS = make_columns(
    "first:model second:compared_with layers:pairs_of_layers all_pairs:mean_of_all_pairs "
    "matched:mean_of_the_best_matching exact",
    {"exact": lambda value: "yes" if value else "≥"},
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
