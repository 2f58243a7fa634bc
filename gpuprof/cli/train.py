"""``gpuprof train``: fit the regressors that estimate models that were never profiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, number, print_rows, say

if TYPE_CHECKING:
    from gpuprof.estimators.learned.training_set import TrainingSet

_COLUMNS = (
    Column("device", "device", right=False),
    Column("architectures", "architectures"),
    Column("ops", "ops"),
    Column("points", "models x batches"),
    Column("latency_factor", "latency within x/÷", number(3)),
    Column("memory_factor", "memory within x/÷", number(3)),
)


def train(
    device: Annotated[str | None, typer.Option(help="Device that was profiled; the one with most data.")] = None,
    regressors: Annotated[
        str, typer.Option(help="Constituents of the stack, separated by commas; lightgbm may be added.")
    ] = "lasso,kernel_ridge,gradient_boosting,xgboost",
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Fit regressors to the measured ops and models of a device; estimate uses them from then on."""
    from gpuprof.estimators.learned.learned import fit_with_intervals
    from gpuprof.estimators.learned.store import save
    from gpuprof.estimators.measured.conformal import interval_factor
    from gpuprof.pipeline.devices import database_path

    chosen = chosen_format(as_json, as_csv)
    data = training_data(db, device)
    say(f"gpuprof: fitting to {len(data.ops.times_ns)} ops of {len(data.architectures)} architectures …")
    model = fit_with_intervals(data, [name.strip() for name in regressors.split(",")])
    folder = save(model, database_path(db), data.data_hash, data.architectures)
    row: dict[str, object] = {
        "device": data.device.name,
        "architectures": len(data.architectures),
        "ops": len(data.ops.times_ns),
        "points": len(data.cases),
        "latency_factor": interval_factor(model.residuals.latency) if model.residuals else None,
        "memory_factor": interval_factor(model.residuals.memory) if model.residuals else None,
        "data_hash": data.data_hash,
    }
    print_rows([row], _COLUMNS, chosen)
    say(f"gpuprof: wrote {folder}")


def training_data(db: Path | None, device: str | None) -> TrainingSet:
    """Return what was measured on ``device``, by default on the device with most measurements."""
    from gpuprof.estimators.learned.training_set import database_graphs, load_training_set
    from gpuprof.pipeline.devices import open_database, resolve_device

    database = open_database(db)
    assert database is not None
    return load_training_set(database, resolve_device(device, database), database_graphs(database))
