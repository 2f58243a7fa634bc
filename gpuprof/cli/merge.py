"""``gpuprof merge``: merge several models that share weights into one graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import COMPLETERS
from gpuprof.cli.options import NetworksArgument, output_option
from gpuprof.cli.output import Column, Format, mebibytes, print_rows, say_note
from gpuprof.domain.number_format import number_formatter
from gpuprof.pipeline.merge import MergeSettings

if TYPE_CHECKING:
    from gpuprof.pipeline.merge import MergedFile

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
_OPERATORS = (
    Column("how", "how", right=False),
    Column("op_type", "type", right=False),
    Column("operators", "operators", lambda v: " + ".join(v) if isinstance(v, list) else str(v), right=False),
    Column("similarity", "similarity", number_formatter()),
    Column("weight_bytes", "weights MiB", mebibytes),
    Column("saved_bytes", "saved MiB", mebibytes),
    Column("reason", "why not", right=False),
)
_DIFFERENCES = (
    Column("model", "model", right=False),
    Column("output", "output", right=False),
    Column("dtype", "type", right=False),
    Column("relative", "difference", number_formatter()),
    Column("tolerance", "tolerated", number_formatter()),
    Column("call", "in the call", right=False),
)


def merge(
    models: NetworksArgument,
    output: Annotated[Path, output_option("File to write.")],
    settings: MergeSettings,
    report: Annotated[bool, typer.Option("--report", help="List every operator and every output.")] = False,
    device: Annotated[
        str | None, typer.Option(autocompletion=COMPLETERS["devices"], help="Device that the gain is predicted for.")
    ] = "cpu",
    db: Annotated[Path | None, typer.Option(help="Kernel database with measured times of ops.")] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Merge models that share weights into one graph, prove that its outputs are the same, and write it."""
    from gpuprof.pipeline.merge import merge as merge_models

    merged = merge_models(models, output, settings=settings, device=device, db=db)
    say_note(*merged.notes)
    _print(merged.files, chosen, report)


def _print(files: Sequence[MergedFile], chosen: Format, report: bool) -> None:
    if report and chosen is not Format.JSON:
        for file in files:
            print_rows(file.operator_rows(), _OPERATORS, chosen, f"operators of {file.path}")
            if chosen is Format.TABLE:
                print_rows(file.output_rows(), _DIFFERENCES, chosen, f"outputs of {file.path}")
        if chosen is Format.CSV:
            return
    full = report and chosen is Format.JSON
    print_rows([file.full_row() if full else file.row() for file in files], _SUMMARY, chosen)
