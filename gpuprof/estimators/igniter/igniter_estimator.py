"""iGniter's analytical model (TPDS'22, section 3) as an estimator to choose, by profiles or coefficients in JSON.

Profiles are of iGniter's own tools, or of the kernel database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.file_access import refuse_pipe
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, refuse_unwritable, unknown_name
from gpuprof.estimators.igniter.igniter import (
    Coefficients,
    Configuration,
    HardwareCoefficients,
    HardwareProfile,
    PlacedWorkload,
    WorkloadCoefficients,
    WorkloadProfile,
    fit_hardware,
    fit_published_workload,
    fit_workload,
    predict,
)
from gpuprof.kernel_db.importing import BATCHES, L2_BATCH, SHARES_PCT, parse_igniter_tables
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow, RunRow, model_at_dims, workload_label
from gpuprof.kernel_db.store import KernelDb

SCHEMA = "gpuprof.igniter/1"
_FOLDER = ".calibrated"  # hidden, so that the database does not read it as a run
_MAX_BYTES = 16 * 2**20


def read_igniter_profile(path: Path) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profile in a file of lines ``{"model or hardware": {"key": value}}`` as iGniter publishes.

    Raises `InputError` when the file cannot be read, has another format or lacks a key; the message names the key.
    """
    return profile_of_tables(parse_igniter_tables(_read_text(path), path), str(path))


def profile_of_tables(
    tables: Mapping[str, Mapping[str, Any]], where: str
) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profile in the tables of the hardware and of each model, as iGniter publishes them.

    Raises `InputError` when a key is missing or garbled; the message names the key and ``where``.
    """
    try:
        hardware = _parse_hardware(tables["hardware"])
        return hardware, {name: _parse_workload(table) for name, table in tables.items() if name != "hardware"}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: the profile lacks or garbles {error}", "name the config.jsonl of iGniter's tools, whole"
        ) from None


def coefficients_path(database: Path, device: str) -> Path:
    """Return the path of a device's coefficients beside a kernel database."""
    return database / _FOLDER / f"{device}.json"


def write_coefficients(
    path: Path, device: str, hardware: HardwareCoefficients, workloads: Mapping[str, WorkloadCoefficients]
) -> None:
    """Write fitted coefficients as JSON. Raises `InputError` when the file cannot be written."""
    content = {
        "schema": SCHEMA,
        "device": device,
        "hardware": asdict(hardware),
        "workloads": {name: asdict(workload) for name, workload in sorted(workloads.items())},
    }
    with refuse_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_coefficients(path: Path) -> tuple[str, HardwareCoefficients, dict[str, WorkloadCoefficients]]:
    """Return the content of `write_coefficients`'s file: the device's name, its coefficients and the models'.

    Raises `InputError` when the file cannot be read or is of another schema.
    """
    try:
        content = json.loads(_read_text(path))
        if content.get("schema") != SCHEMA:
            raise InputError(
                f"{path}: schema {content.get('schema')!r} where {SCHEMA!r} is expected", "calibrate again"
            )
        workloads = {
            name: WorkloadCoefficients(**{key: _freeze_list(value) for key, value in coefficients.items()})
            for name, coefficients in content["workloads"].items()
        }
        return content["device"], HardwareCoefficients(**content["hardware"]), workloads
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no coefficients: {error}", "calibrate again") from None


def _freeze_list(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_text(path: Path) -> str:
    try:
        if refuse_pipe(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, which no profile is")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text") from None


def _parse_hardware(table: Mapping[str, Any]) -> HardwareProfile:
    return HardwareProfile(
        max_power_w=float(table["maxGPUpower"]),
        max_clock_mhz=float(table["maxGPUfrequency"]),
        idle_power_w=float(table["idlepower"]),
        pcie_bytes_per_ms=float(table["bandwidth"]),
        power_w=tuple(table["power"]),
        clock_mhz=tuple(table["frequency"]),
        launch_ms=tuple(table["idletime"]),
        share_unit=float(table["unit"]) / 100.0,
    )


def _parse_workload(table: Mapping[str, Any]) -> WorkloadProfile:
    configurations = tuple(
        Configuration(
            batch,
            share_pct / 100.0,
            float(table["gpulatency"][row][column]),
            float(table["power"][row][column]),
            float(table["frequency"][row][column]),
            float(table["l2caches"][column]) if batch == L2_BATCH else None,
        )
        for row, batch in enumerate(BATCHES)
        for column, share_pct in enumerate(SHARES_PCT)
    )
    return WorkloadProfile(
        load_bytes=float(table["inputdata"]),
        feedback_bytes=float(table["outputdata"]),
        kernels=int(table["kernel"]),
        idle_ms=float(table["idletime_1"]),
        active_ms=float(table["activetime_1"]),
        active_beside_ms=float(table["activetime_2"]),
        clock_beside_mhz=float(table["frequency_2"]),
        l2_beside_pct=float(table["l2cache"]),
        configurations=configurations,
    )


_NEEDED = ("latency_mean_ms", "power_w", "clock_mhz", "dispatch_ms", "kernel_count", "h2d_bytes", "d2h_bytes")
_IMPORTED = "import:igniter"


@dataclass(frozen=True, slots=True)
class _MeasuredWorkload:
    """A workload alone or beside copies of itself, with all figures that iGniter needs.

    Beside others ``dispatch_ms`` is None where the gap between launches is unknown: it is the unprofiled latency less
    the recorded busy time, and the two differ by more than the gap on a crowded GPU.
    """

    latency_ms: float
    power_w: float
    clock_mhz: float
    dispatch_ms: float | None


@dataclass(frozen=True, slots=True)
class _SoloMeasurement(_MeasuredWorkload):
    """A workload alone; ``row`` has its identity and the optional figures."""

    dispatch_ms: float
    row: ModelRow
    kernels: int
    h2d_bytes: int
    d2h_bytes: int

    @property
    def copied_bytes(self) -> int:
        """Bytes to and from the device for a batch."""
        return self.h2d_bytes + self.d2h_bytes


def profile_of(db: KernelDb, device: Device) -> tuple[HardwareProfile, dict[str, WorkloadProfile]]:
    """Return the profiles of ``device`` and of every model measured on it in enough configurations.

    An imported profile of iGniter's own tools is returned unchanged. Measurements must include, for each model, at
    least five (the paper: eleven) configurations of batch and share with power, clock, launch delay (``dispatch_ms``),
    kernels and bytes copied; for one model, one to five copies at once. Raises `InputError` with the missing
    measurements.
    """
    imported = imported_profile(db, device)
    if imported is not None:
        return imported
    models = comparable_rows(read_records(db, ModelRow, {"device": device.name, "processes": 1}))
    complete = [solo for row in models if (solo := _read_complete_row(row)) is not None]
    if not complete:
        missing = [name for name in _NEEDED if not any(getattr(row, name) is not None for row in models)]
        raise InputError(
            f"no model was measured on {device.name} with all of iGniter's metrics: "
            f"{', '.join(missing) or 'never all of them in one row'} missing",
            "profile on a GPU with nsys, or give iGniter's own profile with --profile",
        )
    beside = comparable_rows(read_records(db, ColocationRow, {"device": device.name}))
    pcie = _read_pcie_bytes_per_ms(db, device)
    by_model: dict[str, list[_SoloMeasurement]] = {}
    for measurement in complete:
        by_model.setdefault(model_at_dims(measurement.row.model, measurement.row.dims), []).append(measurement)
    workloads = {
        name: profile
        for name, rows in by_model.items()
        if len(rows) >= 5  # coefficients of the active time
        and (profile := _make_workload_profile(rows, beside, pcie, complete)) is not None
    }
    return _make_hardware_profile(device, complete, beside, pcie), workloads


def imported_profile(db: KernelDb, device: Device) -> tuple[HardwareProfile, dict[str, WorkloadProfile]] | None:
    """Return the last imported profile of iGniter's own tools, None where there is none."""
    runs = read_records(db, RunRow, {"device": device.name, "collector": _IMPORTED})
    for run in sorted(runs, key=lambda run: run.run_id, reverse=True):
        tables = json.loads(run.settings or "{}")
        if tables.get("hardware"):
            return profile_of_tables(tables, f"run {run.run_id}")
    return None


def _read_pcie_bytes_per_ms(db: KernelDb, device: Device) -> float:
    """Return the measured bandwidth of copies: the models' own copies, in timelines, before a benchmark's."""
    rows = [row for row in read_records(db, DeviceRow, {"device": device.name}) if row.pcie_bytes_per_s]
    if not rows:
        raise InputError(f"the bandwidth between host and {device.name} was not measured", "gpuprof profile --igniter")
    # Rows of a device benchmark also have the memory's bandwidth.
    of_models = [row for row in rows if row.dram_bytes_per_s is None]
    latest = max(rows, key=lambda row: row.run_id)
    return float(median(row.pcie_bytes_per_s or 0.0 for row in of_models or [latest])) / 1000.0


def _read_complete_row(row: ModelRow) -> _SoloMeasurement | None:
    figures = _read_figures(row)
    if figures is None or figures.dispatch_ms is None or row.error is not None:
        return None
    if row.kernel_count is None or row.h2d_bytes is None or row.d2h_bytes is None:
        return None
    measured = figures.latency_ms, figures.power_w, figures.clock_mhz, figures.dispatch_ms
    return _SoloMeasurement(*measured, row, row.kernel_count, row.h2d_bytes, row.d2h_bytes)


def _read_figures(row: ModelRow | ColocationRow) -> _MeasuredWorkload | None:
    if row.latency_mean_ms is None or row.power_w is None or row.clock_mhz is None:
        return None
    return _MeasuredWorkload(row.latency_mean_ms, row.power_w, row.clock_mhz, row.dispatch_ms)


def _collect_copies(alone: _SoloMeasurement, beside: Sequence[ColocationRow]) -> dict[int, _MeasuredWorkload]:
    row = alone.row
    label = workload_label(model_at_dims(row.model, row.dims), row.batch, row.sm_share_pct, row.mig_profile, 1)
    by_count: dict[int, _MeasuredWorkload] = {1: alone}
    for colocation in beside:
        same = (colocation.model, colocation.dims, colocation.batch, colocation.sm_share_pct) == (
            row.model, row.dims, row.batch, row.sm_share_pct,
        )  # fmt: skip
        neighbours = colocation.beside.split(" + ")
        if same and set(neighbours) == {label} and (measurement := _read_figures(colocation)) is not None:
            by_count[1 + len(neighbours)] = measurement
    return by_count


def _make_hardware_profile(
    device: Device, rows: Sequence[_SoloMeasurement], beside: Sequence[ColocationRow], pcie: float
) -> HardwareProfile:
    best: tuple[dict[int, _MeasuredWorkload], dict[int, float]] = {}, {}
    for row in rows:  # the model with the known gap of most numbers of copies
        copies = _collect_copies(row, beside)
        gaps = {n: copy.dispatch_ms / row.kernels for n, copy in copies.items() if copy.dispatch_ms is not None}
        best = (copies, gaps) if len(gaps) > len(best[1]) else best
    copies, delays_ms = best
    counts = range(1, len(copies) + 1)
    idle = next((row.row.idle_power_w for row in rows if row.row.idle_power_w is not None), None)
    if len(delays_ms) < 3 or sorted(copies) != list(counts) or idle is None or device.max_power_w is None:
        raise InputError(
            f"iGniter's hardware coefficients need one to five copies of a model at once on {device.name}, and its "
            f"idle power, but there are {_list_counts(copies)}, with a gap between launches {_list_counts(delays_ms)}, "
            f"and {'no' if idle is None else 'an'} idle power",
            "gpuprof profile MODEL --igniter",
        )
    return HardwareProfile(
        device.max_power_w,
        max(row.clock_mhz for row in rows),  # below its limits: some GPUs never reach the clock of their data sheet
        float(idle),
        pcie,
        tuple(copies[count].power_w for count in counts),
        tuple(_snap_clock(copies[count].clock_mhz, rows) for count in counts),
        tuple(delays_ms.get(count) for count in counts),
    )


def _list_counts(counts: Iterable[int]) -> str:
    return f"{', '.join(map(str, sorted(counts))) or 'no'} copies"


def _snap_clock(clock_mhz: float, rows: Sequence[_MeasuredWorkload]) -> float:
    highest = max(row.clock_mhz for row in rows)
    # Clocks are means of samples, so that the highest varies.
    return highest if clock_mhz >= 0.99 * highest else clock_mhz


def _make_workload_profile(
    rows: Sequence[_SoloMeasurement],
    beside: Sequence[ColocationRow],
    pcie: float,
    everything: Sequence[_SoloMeasurement],
) -> WorkloadProfile | None:
    """Return the profile of a model, None if it lacks a complete measurement beside a copy of itself."""
    pairs = ((row, _collect_copies(row, beside).get(2)) for row in rows)
    pair = next(((solo, duo, gap) for solo, duo in pairs if duo and (gap := duo.dispatch_ms) is not None), None)
    if pair is None:
        return None
    alone, together, gap_ms = pair
    return WorkloadProfile(
        load_bytes=alone.h2d_bytes / alone.row.batch,
        feedback_bytes=alone.d2h_bytes / alone.row.batch,
        kernels=alone.kernels,
        idle_ms=alone.dispatch_ms,
        active_ms=_subtract_copies(alone, alone, pcie) - alone.dispatch_ms,
        active_beside_ms=_subtract_copies(together, alone, pcie) - gap_ms,
        clock_beside_mhz=_snap_clock(together.clock_mhz, everything),
        l2_beside_pct=_find_l2_pct(alone, rows, pcie),
        configurations=tuple(
            Configuration(
                row.row.batch,
                row.row.sm_share_pct / 100.0,
                _subtract_copies(row, row, pcie),
                row.power_w,
                _snap_clock(row.clock_mhz, everything),
                row.row.l2_pct,
            )
            for row in rows
        ),
    )


def _find_l2_pct(alone: _SoloMeasurement, rows: Sequence[_SoloMeasurement], pcie: float) -> float:
    """Return the use of L2, from the most similar configuration where this one was timed without counters.

    iGniter ties L2 use to the request rate (section 3.2), so the rate decides similarity.
    """

    def rate(alone: _SoloMeasurement) -> float:
        return alone.row.batch / _subtract_copies(alone, alone, pcie)

    with_l2 = [(row, row.row.l2_pct) for row in rows if row.row.l2_pct is not None]
    return min(with_l2, key=lambda pair: abs(rate(pair[0]) - rate(alone)))[1] if with_l2 else 0.0


def _subtract_copies(measured: _MeasuredWorkload, copied: _SoloMeasurement, pcie: float) -> float:
    """Return the time on the GPU: latency less the transfers."""
    return measured.latency_ms - copied.copied_bytes / pcie


SOURCE = "iGniter"


class IgniterEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by equations 1 to 10 of the paper.

    The coefficients of a device are those of an imported profile of iGniter's own, fitted as by its authors; else those
    kept beside the database by ``gpuprof calibrate``; else fitted to the measurements in the database. ``graphs``:
    unused, since the model reads no graph; ``coefficients``: by device, instead of a database.
    """

    def __init__(
        self,
        db: KernelDb | None,
        graphs: Mapping[str, Path] | None = None,
        coefficients: Mapping[str, Coefficients] | None = None,
    ) -> None:
        self._db = db
        self._known: dict[str, Coefficients] = dict(coefficients or {})

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time beside all neighbours; loading the next batch is hidden (equation 2).

        Raises `InputError` for several processes, a MIG instance, or a model or device without coefficients.
        """
        if processes > 1 or share.mig is not None or batch < 1:
            raise InputError(
                f"iGniter's model has one process on a share of the whole device: nothing is known of {model} "
                f"at batch {batch} with {processes} processes under {share}"
            )
        workload = Workload(model, batch, share)
        hardware, _ = self.coefficients(device)
        victim, neighbours = (
            self._place_workload(device, workload),
            [self._place_workload(device, neighbour) for neighbour in beside],
        )
        predicted = predict(hardware, victim, neighbours)
        return Estimate(workload, device.name, Figure(predicted.latency_ms, SOURCE), overlapped_ms=predicted.load_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes up to the largest in iGniter's profiles: its lines are unreliable beyond."""
        self._workload(device, model)
        return tuple(range(1, max(BATCHES) + 1))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the multiples of the smallest unit of a share."""
        self._workload(device, model)
        unit = self.coefficients(device)[0].share_unit
        return tuple(Share(min(100.0, 100.0 * unit * n)) for n in range(1, round(1.0 / unit) + 1))

    def coefficients(self, device: Device) -> Coefficients:
        """Return the coefficients of a device and of the models on it.

        Raises `InputError` when the device has none.
        """
        if device.name not in self._known:
            self._known[device.name] = self._read_coefficients(device)
        return self._known[device.name]

    def _read_coefficients(self, device: Device) -> Coefficients:
        if self._db is None:
            raise InputError(f"iGniter's coefficients of {device.name} are not known", "give --db DATABASE")
        imported = imported_profile(self._db, device)
        if imported is not None:
            hardware = fit_hardware(imported[0])
            return hardware, {name: fit_published_workload(row, hardware) for name, row in imported[1].items()}
        path = coefficients_path(self._db.path, device.name)
        if path.is_file():
            _, hardware, workloads = read_coefficients(path)
            return hardware, workloads
        profile, models = profile_of(self._db, device)
        hardware = fit_hardware(profile)
        return hardware, {name: fit_workload(model, hardware) for name, model in models.items()}

    def _workload(self, device: Device, model: str) -> WorkloadCoefficients:
        workloads = self.coefficients(device)[1]
        if model not in workloads:
            raise unknown_name(f"model with iGniter's coefficients of {device.name}", model, sorted(workloads))
        return workloads[model]

    def _place_workload(self, device: Device, workload: Workload) -> PlacedWorkload:
        return PlacedWorkload(self._workload(device, workload.model), workload.batch, workload.share.sm_pct / 100.0)
