"""Errors of any estimator on held-out models or devices of a kernel database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.compute as pc

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator
from gpuprof.errors import GpuprofError, InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.learned.evaluation import Summary
from gpuprof.estimators.measured.measured import MeasuredModel, read_measured
from gpuprof.kernel_db.schema import TABLES
from gpuprof.kernel_db.store import KernelDb

#: Units that can be held out, and their columns in every table.
HELD_OUT_UNITS = {"models": "model", "devices": "device"}


@dataclass(frozen=True, slots=True)
class HeldOutLatency:
    """A measured latency, and the estimate of it from a database without the rows of its model or device.

    Attributes
    ----------
    unit : str
        The held-out model or device.
    model, device : str
    batch : int
    measured_ms : float
    predicted_ms : float or None
        None where the estimator has no answer.
    is_inside : bool or None
        Whether the estimate's interval holds the measurement; None without an interval.
    refusal : str
        The estimator's message where it has no answer.
    """

    unit: str
    model: str
    device: str
    batch: int
    measured_ms: float
    predicted_ms: float | None
    is_inside: bool | None = None
    refusal: str = ""


def estimate_held_out(
    name: str,
    database: KernelDb,
    units: str,
    find_device: Callable[[str], Device],
    progress: Callable[[int, int], None] = lambda count, total: None,
) -> list[HeldOutLatency]:
    """Hold out each model or device in turn, and estimate its measured latencies from the rest of the database.

    Raises `InputError` when the database has fewer than two units, or the estimator cannot be made.

    Parameters
    ----------
    name : str
        Estimator, as in `gpuprof.estimators.builtin.make_estimator`.
    database : KernelDb
    units : str
        A key of `HELD_OUT_UNITS`.
    find_device : callable
        Returns the device of a name.
    progress : callable
        Called with the numbers of finished and of all units.
    """
    measured = read_measured(database)
    sets = _group_by_unit(measured, units)
    if len(sets) < 2:
        raise InputError(f"{database.path} holds {len(sets)} of {units}, and one at a time is held out", "profile more")
    latencies: list[HeldOutLatency] = []
    for count, unit in enumerate(sets):
        progress(count, len(sets))
        with TemporaryDirectory() as folder:
            rest = copy_without(database, HELD_OUT_UNITS[units], unit, Path(folder) / "db")
            files = {model.name: Path(model.path) for model in sets[unit] if model.path and Path(model.path).is_file()}
            estimator = make_estimator(name, rest, files)
            for model in sets[unit]:
                devices = [unit] if units == "devices" else list(model.points)
                latencies += _estimate_model(estimator, unit, model, devices, find_device)
    progress(len(sets), len(sets))
    return latencies


def copy_without(database: KernelDb, column: str, value: str, path: Path) -> KernelDb:
    """Return a copy of a database at ``path`` without the rows with this value in a column.

    Runs of the value are left out as wholes, so that no neighbour's row tells of it; imported runs of many models lose
    its rows alone.
    """
    copy = KernelDb.create(path)
    tables = {table: database.read_table(table) for table in TABLES}
    beside = tables["colocations"].filter(pc.equal(tables["colocations"][column], value))["run_id"]
    runs = tables["runs"].filter(pc.not_equal(tables["runs"][column], value))
    run_ids = runs.filter(pc.invert(pc.is_in(runs["run_id"], beside.combine_chunks())))["run_id"].combine_chunks()
    for table, rows in tables.items():
        kept_rows = rows.filter(pc.is_in(rows["run_id"], run_ids))
        if column in rows.column_names:
            kept_rows = kept_rows.filter(pc.not_equal(kept_rows[column], value))
        tables[table] = kept_rows
    if len(run_ids):
        copy.append_tables("held-out", tables)
    return copy


def _group_by_unit(measured: Mapping[str, MeasuredModel], units: str) -> dict[str, list[MeasuredModel]]:
    sets: dict[str, list[MeasuredModel]] = {}
    for model in measured.values():
        base = model.name.partition("[")[0]
        for unit in model.points if units == "devices" else (base,) if model.points else ():
            sets.setdefault(unit, []).append(model)
    return sets


def _estimate_model(
    estimator: Estimator, unit: str, model: MeasuredModel, devices: Sequence[str], find_device: Callable[[str], Device]
) -> Iterator[HeldOutLatency]:
    for name in devices:
        device = find_device(name)
        for point in model.points[name]:
            truth = point.latency_ms
            try:
                figure = estimator.estimate(
                    model.name, device, point.batch, point.share, processes=point.processes
                ).latency_ms
            except GpuprofError as error:
                yield HeldOutLatency(unit, model.name, name, point.batch, truth, None, refusal=str(error))
                continue
            inside = None if figure.interval is None else figure.interval[0] <= truth <= figure.interval[1]
            yield HeldOutLatency(unit, model.name, name, point.batch, truth, figure.value, inside)


def summarise_held_out(latencies: Sequence[HeldOutLatency], name: str, units: str, by_unit: bool) -> list[Summary]:
    """Return the errors of an estimator, for all held-out units together or for each."""
    groups: dict[str, list[HeldOutLatency]] = {}
    for latency in latencies:
        groups.setdefault(latency.unit if by_unit else "", []).append(latency)
    return [
        _summarise(name, units.removesuffix("s"), unit, members)
        for unit, members in groups.items()
        if any(latency.predicted_ms is not None for latency in members)
    ]


def _summarise(name: str, setting: str, unit: str, latencies: Sequence[HeldOutLatency]) -> Summary:
    ratios = [latency.predicted_ms / latency.measured_ms for latency in latencies if latency.predicted_ms is not None]
    errors = 100.0 * np.abs(np.array(ratios) - 1.0)
    inside = [latency.is_inside for latency in latencies if latency.is_inside is not None]
    coverage_pct = 100.0 * sum(inside) / len(inside) if inside else None
    return Summary.of_errors(setting, "latency", name, unit, errors, coverage_pct)
