"""``gpuprof evaluate``: how far off estimates are, on what was measured and left out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, number, print_rows, progress, say
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.estimators.learned.evaluation import Prediction

_COLUMNS = (
    Column("setting", "left out", right=False),
    Column("quantity", "quantity", right=False),
    Column("predictor", "predictor", right=False),
    Column("count", "figures"),
    Column("mean_pct", "mean error %", number()),
    Column("median_pct", "median %", number()),
    Column("p95_pct", "p95 %", number()),
    Column("coverage_pct", "inside 90% interval, %", number()),
)
_ARCHITECTURE = Column("architecture", "architecture", right=False)


def evaluate(
    device: Annotated[str | None, typer.Option(help="Device that was profiled; the one with most data.")] = None,
    regressors: Annotated[
        str, typer.Option(help="Constituents of the stack, separated by commas; lightgbm may be added.")
    ] = "lasso,kernel_ridge,gradient_boosting,xgboost",
    plot: Annotated[Path | None, typer.Option(help="Write predicted against measured here, as SVG.")] = None,
    by_architecture: Annotated[
        bool, typer.Option("--by-architecture", help="A line for each architecture, not one for all.")
    ] = False,
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Leave out each architecture in turn, and batch sizes of known models, and compare with what was measured."""
    from gpuprof.cli.train import training_data
    from gpuprof.estimators.learned.evaluation import leave_one_architecture_out, new_batches, summarise

    chosen = chosen_format(as_json, as_csv)
    data = training_data(db, device)
    names = [name.strip() for name in regressors.split(",")]
    with progress() as bar:
        task = bar.add_task("architectures", total=len(data.architectures))
        predictions = leave_one_architecture_out(data, names, lambda _: bar.advance(task))
    predictions += new_batches(data)
    columns = (*_COLUMNS[:3], _ARCHITECTURE, *_COLUMNS[3:]) if by_architecture else _COLUMNS
    print_rows([asdict(one) for one in summarise(predictions, by_architecture)], columns, chosen)
    if plot is not None:
        _write_plot(plot, predictions)


def _write_plot(path: Path, predictions: list[Prediction]) -> None:
    from gpuprof.estimators.learned.evaluation import INTERPOLATION, NEW_BATCH, UNSEEN
    from gpuprof.estimators.learned.evaluation_plot import svg

    panels = [(UNSEEN, "op time", "stack"), (UNSEEN, "latency", "stack"), (UNSEEN, "memory", "allocation")]
    panels.append((NEW_BATCH, "latency", INTERPOLATION))
    try:
        path.write_text(svg(predictions, panels), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    say(f"gpuprof: wrote {path}")
