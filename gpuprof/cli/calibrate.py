"""``gpuprof calibrate``: fit how workloads slow each other down, iGniter's coefficients of a GPU among it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.calibrate_options import FitOptions, MeasuringOptions
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    number,
    print_rows,
    progress,
    say,
    say_note,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuprof.cli.calibrate_options import Profile
    from gpuprof.domain.device import Device
    from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
    from gpuprof.estimators.interference.choice import Ranked
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.sweep.campaign import Cell
    from gpuprof.profiling.sweep.planning import NamedModel

_COLUMNS = (
    Column("of", "of", right=False),
    Column("coefficient", "coefficient", right=False),
    Column("value", "value", number(4)),
    Column("unit", "unit", right=False),
)
_RANKED = (
    Column("interference", "interference", right=False),
    Column("left_out", "left out", right=False),
    Column("rows", "latencies"),
    Column("mean_pct", "mean error %", number(3)),
    Column("p95_pct", "95th percentile %", number(3)),
    Column("interval", "measured / predicted, 90%"),
    Column("coefficients", "coefficients", right=False),
)
_HARDWARE_UNITS = {
    "max_power_w": "W",
    "max_clock_mhz": "MHz",
    "idle_power_w": "W",
    "pcie_bytes_per_ms": "bytes/ms",
    "alpha_f": "MHz/W",
    "alpha_sch": "ms a workload",
    "beta_sch": "ms",
    "share_unit": "fraction",
}


@with_groups
def calibrate(
    fitting: FitOptions,
    measuring: MeasuringOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="ONNX files, or NAME=FILE: measured here first.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Fit how workloads slow each other down on a device, for estimates beside others.

    Of MODELs it first measures what is missing: on a GPU iGniter's eleven configurations and copies at once, on a
    CPU two to four models beside one another. On a GPU iGniter's coefficients are fitted and kept in the database; on
    any device the interference models are fitted to what was co-located, and judged by leaving out each victim.
    """
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.pipeline.devices import database_path, resolve_device

    chosen = chosen_format(as_json, as_csv)
    path, device = database_path(fitting.db), fitting.device
    if fitting.profile is not None:
        measured = _profile_of_file(fitting.profile)
        name = device or fitting.profile.stem
        print_rows(_rows(name, *fitting.igniter(KernelDb.create(path), name, measured)), _COLUMNS, chosen)
        return
    target = _measure(models, device, measuring, path) if models else resolve_device(device, KernelDb(path))
    database = KernelDb(path)
    if target.kind == "gpu":
        from gpuprof.estimators.igniter.rows import profile_of

        fitted = fitting.igniter(database, target.name, profile_of(database, target))
        print_rows(_rows(target.name, *fitted), _COLUMNS, chosen)
        if chosen is Format.TABLE and database.read("colocations", ["device"], {"device": target.name}).num_rows:
            _judge(database, target, chosen)
        return
    _judge(database, target, chosen)


def _measure(models: Sequence[str], name: str | None, measuring: MeasuringOptions, path: Path) -> Device:
    """Measure what the device's interference models need and the database lacks; return the device."""
    from gpuprof.kernel_db.store import COPIES, KernelDb
    from gpuprof.pipeline.devices import resolve_device, resolve_local_device
    from gpuprof.profiling.collector import choose
    from gpuprof.profiling.sweep import planning
    from gpuprof.profiling.sweep.campaign import Campaign

    here = resolve_local_device(name, measuring.collector, say_note)
    collector, why = choose(measuring.collector, here.kind)
    cells = _cells(planning.parse_models(models), here.kind == "gpu", path / COPIES)
    say(f"{here.name}, collector {why}")
    campaign = Campaign(KernelDb.create(path), here, collector, limits=measuring.limits())
    outcomes = []
    with progress() as bar:
        task = bar.add_task("starting", total=len(cells))
        for outcome in campaign.run(cells, lambda cell: bar.update(task, description=str(cell))):
            outcomes.append(outcome)
            bar.advance(task)
        bar.update(task, description="what the device can do at best")
        campaign.measure_ceilings([Share()])
    failed = [outcome.row["error"] for outcome in outcomes if outcome.row.get("error")]
    old = sum(not outcome.measured_now for outcome in outcomes)
    say(f"{len(outcomes) - old} measured, {old} were there before, {len(failed)} failed")
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(outcomes)} could not be measured: {failed[0]}")
    return resolve_device(here.name, KernelDb(path))


def _cells(models: Sequence[NamedModel], on_gpu: bool, copies: Path) -> tuple[Cell, ...]:
    from gpuprof.profiling.sweep import planning
    from gpuprof.profiling.sweep.colocation_cells import BATCHES, colocation_cells
    from gpuprof.profiling.sweep.igniter_cells import CONFIGURATIONS, igniter_cells

    batches = sorted({batch for batch, _ in CONFIGURATIONS}) if on_gpu else BATCHES
    named = [planning.free_batch_model(model, batches, copies) for model in models]
    return tuple(cell for model in named for cell in igniter_cells(model)) if on_gpu else colocation_cells(named)


def _profile_of_file(path: Path) -> Profile:
    from gpuprof.estimators.igniter.profile import read_igniter_profile

    return read_igniter_profile(path)


def _judge(database: KernelDb, device: Device, chosen: Format) -> None:
    """Print the interference models of the device, best first."""
    from gpuprof.estimators.database import DatabaseEstimator

    colocations = DatabaseEstimator(database).colocations
    ranked = colocations.ranked(device)
    if not ranked:
        raise InputError(
            f"too little was co-located on {device.name} to fit an interference model: "
            f"{len(colocations.measured(device))} latencies",
            "gpuprof calibrate ONE.onnx TWO.onnx, or gpuprof profile --beside",
        )
    print_rows([_ranked_row(one) for one in ranked], _RANKED, chosen)


def _ranked_row(one: Ranked) -> dict[str, object]:
    weights = getattr(one.model, "weights_", None)
    return {
        "interference": one.name,
        "left_out": one.left_out,
        "rows": one.rows,
        "mean_pct": one.mean_pct,
        "p95_pct": one.p95_pct,
        "low": one.low,
        "high": one.high,
        "interval": f"{one.low:.2f} … {one.high:.2f}",
        "coefficients": None if weights is None else ", ".join(f"{float(weight):.3g}" for weight in weights),
    }


def _rows(
    name: str, hardware: HardwareCoefficients, workloads: dict[str, WorkloadCoefficients]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"of": name, "coefficient": key, "value": getattr(hardware, key), "unit": unit}
        for key, unit in _HARDWARE_UNITS.items()
    ]
    for model, one in workloads.items():
        values = {f"k{i}": value for i, value in enumerate(one.active, 1)}
        values |= {"alpha_cache": one.cache, "k_sch": one.launch_ms, "kernels": float(one.kernels)}
        values |= {"alpha_power": one.power[0], "beta_power": one.power[1]}
        values |= {"alpha_cacheutil": one.l2[0], "beta_cacheutil": one.l2[1]}
        rows += [{"of": model, "coefficient": key, "value": value, "unit": ""} for key, value in values.items()]
    return rows
