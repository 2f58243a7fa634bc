"""iGniter's analytical model of co-located inference on a GPU shared by MPS (TPDS'22, section 3).

Times are in milliseconds, frequencies in MHz, powers in watts, data in bytes; a share is a fraction of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
