"""``gpuprof estimate``: a model's requirements at any batch, share and device, with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.options import complete_models
from gpuprof.cli.output import Format, print_rows, say_note
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.table import make_columns
from gpuprof.pipeline.estimate import short_name

_ESTIMATED = make_columns(
    "model dims device share batch beside latency_ms latency_interval:90%_interval latency_source throughput_rps "
    "memory_bytes memory_source",
    {"model": short_name, "latency_ms": NumberFormat(4)},
)


def estimate(
    options: gpuprof.EstimateOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=complete_models,
            help="Models by name in the database, or ONNX files; default: all of the database.",
        ),
    ] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Estimate latency, throughput and memory: measured, interpolated between measurements, or predicted."""
    result = gpuprof.estimate(models or (), options)
    say_note(*result.notes)
    rows = [{**row, "latency_interval": _show_interval(row)} for row in result.rows()]
    print_rows(rows, _ESTIMATED, chosen)


def _show_interval(row: Mapping[str, object]) -> str | None:
    low, high = row["latency_low_ms"], row["latency_high_ms"]
    show = NumberFormat(3)
    return None if low is None or high is None else f"{show(low)} … {show(high)}"
