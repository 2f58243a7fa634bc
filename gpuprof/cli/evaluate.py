"""``gpuprof evaluate``: errors of estimates on left-out measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import OptionalDbOption, ProfiledDeviceOption, RegressorsOption, check_output_file
from gpuprof.cli.output import (
    Column,
    ColumnRole,
    CsvOption,
    JsonOption,
    chosen_format,
    print_rows,
    say_note,
    show_progress,
)

_COLUMNS = (
    Column("setting", "left out", right=False, role=ColumnRole.KEY),
    Column("quantity", "quantity", right=False, role=ColumnRole.KEY),
    Column("predictor", "predictor", right=False, role=ColumnRole.SUBJECT),
    Column("count", "figures"),
    Column("mean_pct", "mean error %", lambda value: _to_tenths(value)),
    Column("median_pct", "median %", lambda value: _to_tenths(value)),
    Column("p95_pct", "p95 %", lambda value: _to_tenths(value)),
    Column("coverage_pct", "inside 90% interval, %", lambda value: _to_tenths(value)),
)
_ARCHITECTURE = Column("architecture", "architecture", right=False)


def evaluate(
    device: ProfiledDeviceOption = None,
    regressors: RegressorsOption = "lasso,kernel_ridge,gradient_boosting,xgboost",
    plot: Annotated[
        Path | None,
        typer.Option(callback=check_output_file, help="File to draw predicted against measured into: .svg or .png."),
    ] = None,
    by_architecture: Annotated[
        bool, typer.Option("--by-architecture", help="Show a line for each architecture instead of one for all.")
    ] = False,
    db: OptionalDbOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Leave out each architecture in turn, and batch sizes of known models, and compare with what was measured."""
    from gpuprof.pipeline.evaluate import evaluate as compare

    chosen = chosen_format(as_json, as_csv)
    names = [name.strip() for name in regressors.split(",")]
    with show_progress() as show:
        result = compare(
            device=device, regressors=names, by_architecture=by_architecture, plot=plot, db=db, progress=show
        )
    columns = (*_COLUMNS[:3], _ARCHITECTURE, *_COLUMNS[3:]) if by_architecture else _COLUMNS
    print_rows(result.rows(), columns, chosen)
    say_note(*result.notes)


def _to_tenths(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, int | float) else "–"
