"""iGniter's analytical model of co-located inference on a GPU by MPS, its fit (TPDS'22, section 3), and estimator.

Times are in milliseconds, frequencies in MHz, powers in watts, data in bytes; a share is a fraction of the GPU.
Profiles are of iGniter's own tools, or of the kernel database; coefficients are kept in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.file_access import decode_text, read_input
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, refuse_unwritable, unknown_name
from gpuprof.kernel_db.importing import igniter_grid
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow, RunRow, model_at_dims, workload_label
from gpuprof.kernel_db.store import KernelDb

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class HardwareCoefficients:
    """The seven coefficients of a GPU."""

    #: ``max_power_w``, ``max_clock_mhz``, ``idle_power_w``: P, F, p_idle.
    max_power_w: float
    max_clock_mhz: float
    idle_power_w: float
    pcie_bytes_per_ms: float  #: B_pcie.
    alpha_f: float  #: MHz for each watt of demand above the limit; negative.
    #: ``alpha_sch``, ``beta_sch``: Scheduling delay of a kernel in ms, linear in the number of co-located workloads.
    alpha_sch: float
    beta_sch: float
    share_unit: float = 0.025  #: r_unit: the smallest step of a share.


@dataclass(frozen=True, slots=True)
class WorkloadCoefficients:
    """The coefficients of a model on a GPU."""

    #: ``load_bytes``, ``feedback_bytes``: d_load, d_feedback, per request.
    load_bytes: float
    feedback_bytes: float
    kernels: int  #: n_k.
    launch_ms: float  #: k_sch: scheduling delay of a kernel when the model runs alone.
    active: tuple[float, float, float, float, float]  #: k_1 … k_5 of equation 11.
    cache: float  #: α_cache: growth of the active time per percent of L2 used by others.
    #: ``power``, ``l2``: α and β of the two lines over b / k_act.
    power: tuple[float, float]
    l2: tuple[float, float]

    def active_ms(self, batch: float, share: float) -> float:
        """Return k_act, the GPU's active time alone (equation 11)."""
        k1, k2, k3, k4, k5 = self.active
        return (k1 * batch**2 + k2 * batch + k3) / (share + k4) + k5

    def power_w(self, batch: float, share: float) -> float:
        """Return p, the power above idle alone (section 3.1, unnumbered)."""
        return max(0.0, self.power[0] * batch / self.active_ms(batch, share) + self.power[1])

    def l2_pct(self, batch: float, share: float) -> float:
        """Return c, the L2 utilisation alone (section 3.1, unnumbered)."""
        return max(0.0, self.l2[0] * batch / self.active_ms(batch, share) + self.l2[1])


#: Coefficients of a GPU, and of the models on it by name.
Coefficients = tuple[HardwareCoefficients, Mapping[str, WorkloadCoefficients]]


@dataclass(frozen=True, slots=True)
class PlacedWorkload:
    """A workload on a GPU: its coefficients, batch size and share."""

    workload: WorkloadCoefficients
    batch: int
    share: float


@dataclass(frozen=True, slots=True)
class IgniterPrediction:
    """The model's prediction for a workload."""

    #: ``load_ms``, ``gpu_ms``, ``feedback_ms``: The three phases.
    load_ms: float
    gpu_ms: float
    feedback_ms: float
    clock_mhz: float
    batch: int

    @property
    def latency_ms(self) -> float:
        """Latency of the batch in ms, t_inf (equation 1)."""
        return self.load_ms + self.gpu_ms + self.feedback_ms

    @property
    def throughput_rps(self) -> float:
        """Throughput in requests/s, h (equation 2), with overlapped loading."""
        return 1000.0 * self.batch / (self.gpu_ms + self.feedback_ms)


def predict(
    hardware: HardwareCoefficients, victim: PlacedWorkload, beside: Sequence[PlacedWorkload]
) -> IgniterPrediction:
    """Return the prediction for ``victim`` beside any number of neighbours (equations 1 to 10)."""
    together = [victim, *beside]
    workload = victim.workload
    extra = added_launch_ms(hardware, len(together))
    launching = (workload.launch_ms + extra) * workload.kernels  # equation 5
    l2_pct = sum(neighbour.workload.l2_pct(neighbour.batch, neighbour.share) for neighbour in beside)
    active = workload.active_ms(victim.batch, victim.share) * (1.0 + workload.cache * l2_pct)  # equation 8
    demand = sum(p.workload.power_w(p.batch, p.share) for p in together) + hardware.idle_power_w  # equation 10
    clock = clock_mhz(hardware, demand)
    return IgniterPrediction(
        load_ms=workload.load_bytes * victim.batch / hardware.pcie_bytes_per_ms,  # equation 3
        gpu_ms=(launching + active) * hardware.max_clock_mhz / clock,  # equation 4
        feedback_ms=workload.feedback_bytes * victim.batch / hardware.pcie_bytes_per_ms,  # equation 3
        clock_mhz=clock,
        batch=victim.batch,
    )


def added_launch_ms(hardware: HardwareCoefficients, workloads: int) -> float:
    """Return Δ_sch, the scheduling delay of a kernel added by co-location (equations 6 and 7)."""
    return 0.0 if workloads <= 1 else max(0.0, hardware.alpha_sch * workloads + hardware.beta_sch)


def clock_mhz(hardware: HardwareCoefficients, demand_w: float) -> float:
    """Return the frequency at a power demand (equation 9), at least a tenth of the highest."""
    over = max(0.0, demand_w - hardware.max_power_w)
    return max(hardware.max_clock_mhz + hardware.alpha_f * over, 0.1 * hardware.max_clock_mhz)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Measurements of a GPU with 1, 2, … copies of one workload."""

    max_power_w: float
    max_clock_mhz: float
    idle_power_w: float
    pcie_bytes_per_ms: float
    #: ``power_w``, ``clock_mhz``: Power and frequency by the number of copies, from one copy on.
    power_w: tuple[float, ...]
    clock_mhz: tuple[float, ...]
    #: Scheduling delay of a kernel, by the number of copies; None where the timeline shows none.
    launch_ms: tuple[float | None, ...]
    share_unit: float = 0.025


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration in which a model ran alone."""

    batch: int
    share: float  #: Fraction of the GPU.
    gpu_ms: float  #: Execution on the GPU, transfers not included.
    power_w: float
    clock_mhz: float
    l2_pct: float | None = None  #: None where not measured.


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """Measurements of a model alone in some configurations, and once beside a copy of itself."""

    load_bytes: float
    feedback_bytes: float
    kernels: int
    idle_ms: float  #: Scheduling delay of all kernels alone.
    #: ``active_ms``, ``active_beside_ms``: GPU active time of a configuration alone and beside a copy of itself.
    active_ms: float
    active_beside_ms: float
    clock_beside_mhz: float  #: Frequency with both running.
    l2_beside_pct: float  #: L2 utilisation of the copy.
    configurations: tuple[Configuration, ...]


def fit_hardware(profile: HardwareProfile) -> HardwareCoefficients:
    """Return the coefficients of the GPU.

    If the frequency never fell, the GPU never reached its power limit, and alpha_f is unknown: it is 0, and predictions
    hold only below the limit. Else the frequency falls in proportion to the demand above the limit. Demand above the
    limit cannot be measured: it is the last demand below the limit plus, for each further copy, the average demand
    added by a copy before. The scheduling delay is that at the highest frequency, as equation 4 divides it. Raises
    `InputError` when the scheduling delay was measured for too few numbers of copies to fit a line, or at the highest
    frequency for at most one.
    """
    power, clock = np.array(profile.power_w), np.array(profile.clock_mhz)
    delay = {count: launch_ms for count, launch_ms in enumerate(profile.launch_ms, 1) if launch_ms is not None}
    free = int((clock >= profile.max_clock_mhz * 0.999).sum())
    if len(delay) < 3 or 1 not in delay or free < 2:
        raise InputError("the hardware profile must have three co-locations, two of them at full frequency")
    each = (power[free - 1] - power[0]) / (free - 1)
    over = power[free - 1] + each * np.arange(1, len(clock) - free + 1) - profile.max_power_w
    fall = clock[free:] - profile.max_clock_mhz
    usable = over > 0.0
    alpha_f = float(fall[usable] @ over[usable] / (over[usable] @ over[usable])) if usable.any() else 0.0
    together = [count for count in delay if count > 1]
    added = [delay[count] * clock[count - 1] / profile.max_clock_mhz - delay[1] for count in together]
    alpha_sch, beta_sch = np.polyfit(together, added, 1)
    return HardwareCoefficients(
        profile.max_power_w,
        profile.max_clock_mhz,
        profile.idle_power_w,
        profile.pcie_bytes_per_ms,
        alpha_f,
        float(alpha_sch),
        float(beta_sch),
        profile.share_unit,
    )


def fit_published_workload(profile: WorkloadProfile, hardware: HardwareCoefficients) -> WorkloadCoefficients:
    """Return the coefficients of a model as iGniter's authors fit them, for a profile by their own tools.

    k_1 … k_5 by plain least squares over shares in percent, without bounds; the rest as `fit_workload` does. The
    paper's plans depend on these coefficients: with positive coefficients its twelve workloads fit on five GPUs, not
    six. Raises `InputError` when there are fewer configurations than coefficients.
    """
    from scipy.optimize import curve_fit  # half a second to import, not needed for unmeasured GPUs

    _require_configurations(profile)
    time = _column(profile, "gpu_ms") * np.minimum(1.0, _speeds(profile, hardware)) - profile.idle_ms
    at = np.stack([_column(profile, "batch"), 100.0 * _column(profile, "share")])
    k, _ = curve_fit(_compute_active, at, time)
    k1, k2, k3, k4, k5 = k.tolist()
    return _fit_rest(profile, hardware, (k1 / 100.0, k2 / 100.0, k3 / 100.0, k4 / 100.0, k5))


def _compute_active(at: Array, /, k1: float, k2: float, k3: float, k4: float, k5: float) -> Array:
    """Return the active time of batches under shares (equation 11)."""
    batch, share = at
    return np.asarray((k1 * batch**2 + k2 * batch + k3) / (share + k4) + k5)


def fit_workload(profile: WorkloadProfile, hardware: HardwareCoefficients) -> WorkloadCoefficients:
    """Return the coefficients of a model.

    The active time is the execution time at the highest frequency less the scheduling delay; its five coefficients
    minimise the relative error and are at least 0, so that time neither grows with the share nor falls with the batch.
    Raises `InputError` when there are fewer configurations than coefficients.
    """
    _require_configurations(profile)
    at = np.stack([_column(profile, "batch"), _column(profile, "share")])
    return _fit_rest(profile, hardware, _fit_active(at, _active_ms(profile, hardware)))


def _require_configurations(profile: WorkloadProfile) -> None:
    if len(profile.configurations) < 5:
        raise InputError(f"five coefficients need as many configurations but got {len(profile.configurations)}")


def _speeds(profile: WorkloadProfile, hardware: HardwareCoefficients) -> Array:
    """Return the frequency of each configuration, as a part of the highest."""
    return _column(profile, "clock_mhz") / hardware.max_clock_mhz


def _column(profile: WorkloadProfile, name: str) -> Array:
    """Return a figure of each configuration."""
    return np.array([getattr(configuration, name) for configuration in profile.configurations], dtype=float)


def _active_ms(profile: WorkloadProfile, hardware: HardwareCoefficients) -> Array:
    """Return the active time of each configuration at the highest frequency."""
    total = _column(profile, "gpu_ms") * _speeds(profile, hardware)
    # Kept positive, since errors are relative: the delay comes from another run and may exceed a short time.
    return np.maximum(total - profile.idle_ms, 0.05 * total)


def _fit_rest(
    profile: WorkloadProfile, hardware: HardwareCoefficients, active: tuple[float, float, float, float, float]
) -> WorkloadCoefficients:
    """Return the coefficients of a model, given k_1 … k_5."""
    ability = _column(profile, "batch") / _active_ms(profile, hardware)
    above_idle = _column(profile, "power_w") - hardware.idle_power_w
    # A GPU at its power limit draws the limit under any load: such points are not on the line.
    unthrottled = _speeds(profile, hardware) > 0.999
    l2_pct = _column(profile, "l2_pct")
    known = ~np.isnan(l2_pct)
    slower = profile.active_beside_ms * profile.clock_beside_mhz / hardware.max_clock_mhz / profile.active_ms
    return WorkloadCoefficients(
        load_bytes=profile.load_bytes,
        feedback_bytes=profile.feedback_bytes,
        kernels=profile.kernels,
        launch_ms=profile.idle_ms / max(profile.kernels, 1),
        active=active,
        cache=max(0.0, (slower - 1.0) / profile.l2_beside_pct) if profile.l2_beside_pct > 0 else 0.0,
        power=_line(ability[unthrottled], above_idle[unthrottled]),
        l2=_line(ability[known], l2_pct[known]),
    )


def _fit_active(at: Array, active: Array) -> tuple[float, float, float, float, float]:
    """Fit equation 11, starting from a few values of k_4 with the linear coefficients k_1, k_2, k_3 and k_5 solved."""

    from scipy.optimize import least_squares  # half a second to import, not needed for unmeasured GPUs

    def residual(k: Array) -> Array:
        return np.asarray(_compute_active(at, *k) / active - 1.0)

    (batch, share), best = at, None
    for k4 in (0.0, 0.02, 0.1, 0.4):
        each = float(np.median(active * (share + k4) / batch))
        start = np.array([1e-4 * each, each, 0.1 * each, k4, 0.01 * float(active.min())])
        solution = least_squares(residual, start, bounds=(0.0, np.inf), x_scale=np.maximum(start, 1e-6))
        if best is None or solution.cost < best.cost:
            best = solution
    assert best is not None
    k1, k2, k3, k4, k5 = (float(value) for value in best.x)
    return k1, k2, k3, k4, k5


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Return a fitted non-decreasing line; the mean for fewer than two points."""
    if len(x) < 2 or float(np.ptp(x)) == 0.0:
        return 0.0, float(y.mean()) if len(y) else 0.0
    slope, start = np.polyfit(x, y, 1)
    return (float(slope), float(start)) if slope >= 0.0 else (0.0, float(y.mean()))


SCHEMA = "gpuprof.igniter/1"
_FOLDER = ".calibrated"  # hidden, so that the database does not read it as a run


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
        content = json.loads(decode_text(read_input(path, "name coefficients that gpuprof calibrate wrote"), path))
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
    grid = igniter_grid()
    configurations = tuple(
        Configuration(
            batch,
            share_pct / 100.0,
            float(table["gpulatency"][row][column]),
            float(table["power"][row][column]),
            float(table["frequency"][row][column]),
            float(table["l2caches"][column]) if batch == grid.pair_batch else None,
        )
        for row, batch in enumerate(grid.batches)
        for column, share_pct in enumerate(grid.shares_pct)
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


@dataclass(frozen=True, slots=True)
class _MeasuredWorkload:
    """A workload alone or beside copies of itself, with all figures that iGniter needs.

    Beside others ``dispatch_ms`` is None where the gap between launches is unknown: it is the unprofiled latency minus
    the recorded busy time, whose errors exceed the gap on a crowded GPU.
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
    runs = read_records(db, RunRow, {"device": device.name, "collector": "import:igniter"})
    for run in sorted(runs, key=lambda run: run.run_id, reverse=True):
        tables = json.loads(run.settings or "{}")
        if tables.get("hardware"):
            return profile_of_tables(tables, f"run {run.run_id}")
    return None


def _read_pcie_bytes_per_ms(db: KernelDb, device: Device) -> float:
    """Return the measured PCIe bandwidth: of the models' own copies in timelines, otherwise of a benchmark."""
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
    """Return the time on the GPU: the latency minus the transfers."""
    return measured.latency_ms - (copied.h2d_bytes + copied.d2h_bytes) / pcie


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
        victim, *neighbours = (self._place_workload(device, member) for member in (workload, *beside))
        predicted = predict(self.coefficients(device)[0], victim, neighbours)
        return Estimate(workload, device.name, Figure(predicted.latency_ms, SOURCE), overlapped_ms=predicted.load_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes up to the largest in iGniter's profiles: its lines are unreliable beyond."""
        self._workload(device, model)
        return tuple(range(1, max(igniter_grid().batches) + 1))

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
