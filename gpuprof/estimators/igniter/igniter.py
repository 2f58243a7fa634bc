"""iGniter's analytical model of co-located inference on a GPU shared by MPS, and its fit (TPDS'22, section 3).

Times are in milliseconds, frequencies in MHz, powers in watts, data in bytes; a share is a fraction of the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.errors import InputError


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
    """Return the frequency under a demand for power (equation 9), at least a tenth of the highest."""
    over = max(0.0, demand_w - hardware.max_power_w)
    return max(hardware.max_clock_mhz + hardware.alpha_f * over, 0.1 * hardware.max_clock_mhz)


Array = NDArray[Any]


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

    A GPU whose frequency never fell was never at its limit, so that its behaviour beyond is unknown: alpha_f is then 0,
    and predictions hold below the limit. Else the frequency falls in proportion to the demand above the limit. Demand
    above the limit cannot be measured: it is the last demand below the limit plus, for each further copy, the average
    demand added by a copy before. The scheduling delay is that at the highest frequency, as equation 4 divides it.
    Raises `InputError` when the scheduling delay is known for too few numbers of copies to fit a line, or all but one
    are at a reduced frequency.
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
    configurations = profile.configurations
    batch = np.array([configuration.batch for configuration in configurations], dtype=float)
    percent = np.array([100.0 * configuration.share for configuration in configurations])
    speed = np.array([min(1.0, configuration.clock_mhz / hardware.max_clock_mhz) for configuration in configurations])
    time = np.array([configuration.gpu_ms for configuration in configurations]) * speed - profile.idle_ms
    k, _ = curve_fit(_compute_active, np.stack([batch, percent]), time)
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
    batch = np.array([configuration.batch for configuration in profile.configurations], dtype=float)
    share = np.array([configuration.share for configuration in profile.configurations])
    return _fit_rest(profile, hardware, _fit_active(batch, share, _active_ms(profile, hardware)))


def _require_configurations(profile: WorkloadProfile) -> None:
    if len(profile.configurations) < 5:
        raise InputError(f"five coefficients need as many configurations but got {len(profile.configurations)}")


def _speeds(profile: WorkloadProfile, hardware: HardwareCoefficients) -> Array:
    """Return the frequency of each configuration, as a part of the highest."""
    return np.array([configuration.clock_mhz for configuration in profile.configurations]) / hardware.max_clock_mhz


def _active_ms(profile: WorkloadProfile, hardware: HardwareCoefficients) -> Array:
    """Return the active time of each configuration at the highest frequency."""
    total = np.array([configuration.gpu_ms for configuration in profile.configurations]) * _speeds(profile, hardware)
    # Kept positive, since errors are relative: the delay comes from another run and may exceed a short time.
    return np.maximum(total - profile.idle_ms, 0.05 * total)


def _fit_rest(
    profile: WorkloadProfile, hardware: HardwareCoefficients, active: tuple[float, float, float, float, float]
) -> WorkloadCoefficients:
    """Return the coefficients of a model, given k_1 … k_5."""
    batch = np.array([configuration.batch for configuration in profile.configurations], dtype=float)
    ability = batch / _active_ms(profile, hardware)
    above_idle = np.array([configuration.power_w for configuration in profile.configurations]) - hardware.idle_power_w
    # A GPU at its power limit draws the limit under any load: such points are not on the line.
    unthrottled = _speeds(profile, hardware) > 0.999
    pairs = [(a, row.l2_pct) for a, row in zip(ability, profile.configurations, strict=True) if row.l2_pct is not None]
    slower = profile.active_beside_ms * profile.clock_beside_mhz / hardware.max_clock_mhz / profile.active_ms
    return WorkloadCoefficients(
        load_bytes=profile.load_bytes,
        feedback_bytes=profile.feedback_bytes,
        kernels=profile.kernels,
        launch_ms=profile.idle_ms / max(profile.kernels, 1),
        active=active,
        cache=max(0.0, (slower - 1.0) / profile.l2_beside_pct) if profile.l2_beside_pct > 0 else 0.0,
        power=_line(ability[unthrottled], above_idle[unthrottled]),
        l2=_line(np.array([a for a, _ in pairs]), np.array([c for _, c in pairs])),
    )


def fit_all(
    hardware: HardwareProfile, workloads: Mapping[str, WorkloadProfile]
) -> tuple[HardwareCoefficients, dict[str, WorkloadCoefficients]]:
    """Return the coefficients of the GPU and of each model."""
    fitted = fit_hardware(hardware)
    return fitted, {name: fit_workload(profile, fitted) for name, profile in workloads.items()}


def _fit_active(batch: Array, share: Array, active: Array) -> tuple[float, float, float, float, float]:
    """Fit equation 11, starting from a few values of k_4 with the linear coefficients k_1, k_2, k_3 and k_5 solved."""

    from scipy.optimize import least_squares  # half a second to import, not needed for unmeasured GPUs

    def residual(k: Array) -> Array:
        return np.asarray(_compute_active(np.stack([batch, share]), *k) / active - 1.0)

    best = None
    for k4 in (0.0, 0.02, 0.1, 0.4):
        each = float(np.median(active * (share + k4) / batch))
        start = np.array([1e-4 * each, each, 0.1 * each, k4, 0.01 * float(active.min())])
        solution = least_squares(residual, start, bounds=(0.0, np.inf), x_scale=np.maximum(start, 1e-6))
        if best is None or solution.cost < best.cost:
            best = solution
    assert best is not None
    k1, k2, k3, k4, k5 = (float(value) for value in best.x)
    return k1, k2, k3, k4, k5


def _line(x: Array, y: Sequence[float] | Array) -> tuple[float, float]:
    """Fit a non-decreasing line; the mean with fewer than two points."""
    y = np.asarray(y)
    if len(x) < 2 or float(np.ptp(x)) == 0.0:
        return 0.0, float(y.mean()) if len(y) else 0.0
    slope, start = np.polyfit(x, y, 1)
    return (float(slope), float(start)) if slope >= 0.0 else (0.0, float(y.mean()))
