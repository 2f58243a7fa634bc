"""iGniter's model for many workloads at once, given only the sums of their neighbours' L2 use and power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    PlacedWorkload,
    WorkloadCoefficients,
    added_launch_ms,
)


@dataclass(frozen=True, slots=True)
class IgniterTable:
    """Implements `gpuprof.domain.interference_table.InterferenceTable` by equations 1 to 10.

    The pressures are the L2 use in percent and the power in watts. Scheduling delays grow with the number of workloads,
    active time with the L2 use of the others, and the clock falls with the power of all, so that less pressure is
    quicker.
    """

    hardware: HardwareCoefficients
    pressures: Floats  #: Shape (n, 2).
    copied_ms: Floats  #: Shape (n, 2). Loading and feedback (equation 3).
    launching: Floats  #: Shape (n, 2). Kernels, and the scheduling delay of each alone.
    active: Floats  #: Shape (n, 2). Active time alone in ms, and its growth per percent of L2 used by others.

    def take(self, rows: Integers) -> Self:
        """Return the table of some of the workloads."""
        own = (one[rows] for one in (self.pressures, self.copied_ms, self.launching, self.active))
        return type(self)(self.hardware, *own)

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        """Return each workload's batch time among ``count`` workloads, and the time without loading (equation 2)."""
        crowded = np.maximum(totals[0] - self.pressures[:, 0], 0.0)
        demand_w = np.maximum(totals[1], self.pressures[:, 1]) + self.hardware.idle_power_w
        over = np.maximum(demand_w - self.hardware.max_power_w, 0.0)
        highest = self.hardware.max_clock_mhz
        clock = np.maximum(highest + self.hardware.alpha_f * over, 0.1 * highest)
        launching = (self.launching[:, 1] + added_launch_ms(self.hardware, count)) * self.launching[:, 0]
        active = self.active[:, 0] * (1.0 + self.active[:, 1] * crowded)
        occupied = (launching + active) * highest / clock + self.copied_ms[:, 1]
        return occupied + self.copied_ms[:, 0], occupied


def tabulate_workloads(hardware: HardwareCoefficients, placed: Sequence[PlacedWorkload | None]) -> IgniterTable | None:
    """Return the table; None where by these coefficients neighbours may quicken one another.

    ``placed``: None stands for a workload outside the model.
    """
    rows = [_row(hardware, one) for one in placed]
    table = np.array(rows, dtype=float).reshape(len(rows), 8)
    known = table[np.isfinite(table[:, 6])]
    if hardware.alpha_f > 0.0 or hardware.alpha_sch < 0.0 or np.any(known[:, 6:] < 0.0) or np.any(known[:, 4] < 0.0):
        return None
    return IgniterTable(hardware, table[:, :2], table[:, 2:4], table[:, 4:6], table[:, 6:])


def _row(hardware: HardwareCoefficients, placed: PlacedWorkload | None) -> tuple[float, ...]:
    if placed is None:
        return (0.0,) * 6 + (np.inf, 0.0)
    own, batch, share = placed.workload, placed.batch, placed.share
    return (
        own.l2_pct(batch, share),
        own.power_w(batch, share),
        *_copied_ms(hardware, own, batch),
        own.kernels,
        own.launch_ms,
        own.active_ms(batch, share),
        own.cache,
    )


def _copied_ms(hardware: HardwareCoefficients, coefficients: WorkloadCoefficients, batch: int) -> tuple[float, float]:
    per_ms = hardware.pcie_bytes_per_ms
    return coefficients.load_bytes * batch / per_ms, coefficients.feedback_bytes * batch / per_ms
