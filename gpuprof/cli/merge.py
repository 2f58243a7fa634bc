"""``gpuprof merge``: merge several models that share weights into one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import COMPLETERS
from gpuprof.cli.options import NetworksArgument, output_option
from gpuprof.cli.output import Format, make_columns, mebibytes, print_rows, say_note
from gpuprof.pipeline.merge import MergeSettings

_SUMMARY = make_columns(
    "file models operators_merged operators_sharing:sharing_weights operators:of other_ops_merged:other_ops "
    "weight_bytes_before:weights_MiB weight_bytes_after:merged_MiB predicted_gain_us:predicted_gain_µs "
    "largest_difference",
    {"weight_bytes_before": mebibytes, "weight_bytes_after": mebibytes},
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
