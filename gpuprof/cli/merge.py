"""``gpuprof merge``: merge several models that share weights into one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import COMPLETERS
from gpuprof.cli.options import NetworksArgument, output_option
from gpuprof.cli.output import Column, Format, mebibytes, print_rows, say_note
from gpuprof.domain.number_format import number_formatter
from gpuprof.pipeline.merge import MergeSettings

_SUMMARY = (
    Column("file", "file", right=False),
    Column("models", "models", lambda value: ", ".join(value) if isinstance(value, list) else str(value), right=False),
    Column("operators_merged", "operators merged"),
    Column("operators_sharing", "sharing weights"),
    Column("operators", "of"),
    Column("other_ops_merged", "other ops"),
    Column("weight_bytes_before", "weights MiB", mebibytes),
    Column("weight_bytes_after", "merged MiB", mebibytes),
    Column("predicted_gain_us", "predicted gain µs", number_formatter()),
    Column("largest_difference", "largest difference", number_formatter()),
)


def merge(
    models: NetworksArgument,
    output: Annotated[Path, output_option("File to write.")],
    settings: MergeSettings,
    device: Annotated[
        str | None, typer.Option(autocompletion=COMPLETERS["devices"], help="Device that the gain is predicted for.")
    ] = "cpu",
    db: Annotated[Path | None, typer.Option(help="Kernel database that describes the device.")] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Merge models that share weights into one graph, prove that its outputs are the same, and write it.

    --json lists every operator and output.
    """
    from gpuprof.pipeline.merge import merge as merge_models

    merged = merge_models(models, output, settings=settings, device=device, db=db)
    say_note(*merged.notes)
    print_rows(merged.rows(), _SUMMARY, chosen)
