"""``gpuprof report``: one HTML page of measurements, predictions, maps, simulations and load tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import output_option
from gpuprof.cli.output import say_note


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Sources: a database, maps, and --json of compare, simulate, load and evaluate; default: the database "
            "and map.json, as far as they are there.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, output_option("File to write the page to.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page that opens from disk: interactive plots, in light and dark."""
    from gpuprof.pipeline.devices import database_path
    from gpuprof.pipeline.report import report as write_report

    usual = [database_path(None), Path("map.json")]
    say_note(*write_report(sources or [path for path in usual if path.exists()], output).notes)
