"""What a model needs of a GPU, from its kernels: the three metrics of Creq, bandwidths, and the gaps between kernels.

Elvinger's thesis (2024): the most achieved occupancy of kernels that overlap (§5.2.1, eq. 5.3, after USHER), its
time-weighted average (WAO, §5.3.1), and the time-weighted SM utilisation (WSM, §5.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.timeline import D2H, H2D, LAUNCH, column

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GpuRequirement:
    """Figures of one run of a model, medians over the runs that were recorded; None: not recorded.

    A profiler slows down the first run that it sees: it allocates and registers. Counts and bytes are means.

    Attributes
    ----------
    max_occupancy_pct, wavg_occupancy_pct, wavg_sm_util_pct : float or None
        The metrics of Creq. The first can pass 100 where kernels overlap: their sum is what eq. 5.3 says. Averages
        are over the whole execution, gaps between kernels included, as in the thesis.
    l2_pct, dram_pct : float or None
        Use of L2's and DRAM's bandwidth, weighted by the kernels' times.
    kernel_count : float
    busy_ms : float
        Time in which a kernel ran.
    dispatch_ms : float
        Time between the first kernel's start and the last one's end in which none ran.
    h2d_bytes, d2h_bytes : float or None
    """

    max_occupancy_pct: float | None
    wavg_occupancy_pct: float | None
    wavg_sm_util_pct: float | None
    l2_pct: float | None
    dram_pct: float | None
    kernel_count: float
    busy_ms: float
    dispatch_ms: float
    h2d_bytes: float | None
    d2h_bytes: float | None


def compute_requirement(
    kernels: pd.DataFrame, copies: pd.DataFrame | None, device: Device | None
) -> GpuRequirement | None:
    """Return what one run of the model needs; None where no kernel has a time.

    A metric is None unless it is known of every kernel that ran: an average over those that happened to be counted
    would be of another model.

    Parameters
    ----------
    kernels : DataFrame
        Kernels of the measured runs, with ``repeat``; those without ``start_ns`` are left out.
    copies : DataFrame or None
        As `Timeline.copies`; None: copies were not recorded.
    device : Device or None
        For SM utilisation.
    """
    timed = kernels[column(kernels, "start_ns").notna() & column(kernels, "duration_ns").notna()]
    if not len(timed):
        return None
    timed = timed.assign(sm_util_pct=_sm_utilization(timed, device))
    runs = [_of_run(part) for _, part in timed.groupby("repeat", sort=True)]
    copied = {name: _copied_bytes(copies, name, len(runs)) for name in (H2D, D2H)}
    return GpuRequirement(
        max_occupancy_pct=_median(run["max_occupancy_pct"] for run in runs),
        wavg_occupancy_pct=_median(run["wavg_occupancy_pct"] for run in runs),
        wavg_sm_util_pct=_median(run["wavg_sm_util_pct"] for run in runs),
        l2_pct=_median(run["l2_pct"] for run in runs),
        dram_pct=_median(run["dram_pct"] for run in runs),
        kernel_count=len(timed) / len(runs),
        busy_ms=median(run["busy_ms"] or 0.0 for run in runs),
        dispatch_ms=median(run["dispatch_ms"] or 0.0 for run in runs),
        h2d_bytes=copied[H2D],
        d2h_bytes=copied[D2H],
    )


def overlapping(starts: Integers, ends: Integers, values: Floats) -> tuple[Integers, Floats, Integers]:
    """Cut time at every start and end, and sum what runs in each interval (thesis §5.3.1, Figure 5.3).

    Parameters
    ----------
    starts, ends : ndarray of int64, shape (n,)
    values : ndarray of float64, shape (n,)

    Returns
    -------
    lengths, sums, counts : ndarray, shape (m,)
        Of each interval: its length, the sum of the values, and how many run in it.
    """
    borders = np.unique(np.concatenate([starts, ends]))
    change = np.zeros(len(borders))
    running = np.zeros(len(borders), dtype=np.int64)
    first, last = np.searchsorted(borders, starts), np.searchsorted(borders, ends)
    np.add.at(change, first, values)
    np.subtract.at(change, last, values)
    np.add.at(running, first, 1)
    np.subtract.at(running, last, 1)
    counts = np.cumsum(running)[:-1]
    # Where nothing runs the sum is zero, not what rounding left of it.
    return np.diff(borders), np.where(counts > 0, np.cumsum(change)[:-1], 0.0), counts


def _of_run(part: pd.DataFrame) -> dict[str, float | None]:
    starts = part["start_ns"].to_numpy(dtype=np.int64)
    ends = starts + np.maximum(part["duration_ns"].to_numpy(dtype=np.int64), 0)
    occupancy = _complete_column(part, "achieved_occupancy_pct")
    utilization = _complete_column(part, "sm_util_pct")
    lengths, sums, counts = overlapping(starts, ends, np.zeros(len(part)) if occupancy is None else occupancy)
    busy = float(lengths[counts > 0].sum())
    found: dict[str, float | None] = {
        "busy_ms": busy / 1e6,
        "dispatch_ms": float(lengths[counts == 0].sum()) / 1e6,
        "l2_pct": _weighted_mean(part, "l2_throughput_pct"),
        "dram_pct": _weighted_mean(part, "dram_throughput_pct"),
        "max_occupancy_pct": None,
        "wavg_occupancy_pct": None,
        "wavg_sm_util_pct": None,
    }
    if occupancy is not None and busy:
        found["max_occupancy_pct"] = float(sums[counts > 0].max())
        found["wavg_occupancy_pct"] = float((lengths * sums).sum() / lengths.sum())
    if utilization is not None and busy:
        lengths, sums, _ = overlapping(starts, ends, utilization)
        found["wavg_sm_util_pct"] = float((lengths * np.minimum(sums, 100.0)).sum() / lengths.sum())
    return found


def _sm_utilization(kernels: pd.DataFrame, device: Device | None) -> Floats:
    from gpuprof.domain.occupancy import occupancies

    unknown = np.full(len(kernels), np.nan)
    needed = (*LAUNCH, "registers_per_thread")
    if device is None or device.sm is None or any(column(kernels, name).isna().any() for name in needed):
        return unknown
    size = {name: kernels[name].to_numpy(dtype=np.int64) for name in needed}
    shared = [column(kernels, f"{kind}_shared_bytes").fillna(0).to_numpy(dtype=np.int64) for kind in _SHARED]
    try:
        return occupancies(
            device,
            blocks=size["grid_x"] * size["grid_y"] * size["grid_z"],
            threads_per_block=size["block_x"] * size["block_y"] * size["block_z"],
            registers_per_thread=size["registers_per_thread"],
            static_shared_bytes=shared[0],
            dynamic_shared_bytes=shared[1],
        ).sm_utilization_pct
    except InputError:  # a compute capability whose rules are not known
        return unknown


_SHARED = ("static", "dynamic")


def _complete_column(part: pd.DataFrame, name: str) -> Floats | None:
    values = column(part, name)
    return None if values.isna().any() else values.to_numpy(dtype=np.float64)


def _weighted_mean(part: pd.DataFrame, name: str) -> float | None:
    values, weights = _complete_column(part, name), part["duration_ns"].to_numpy(dtype=np.float64)
    return None if values is None or not weights.sum() else float(np.average(values, weights=weights))


def _copied_bytes(copies: pd.DataFrame | None, direction: str, runs: int) -> float | None:
    if copies is None:
        return None
    return float(copies.loc[copies["direction"] == direction, "bytes"].sum()) / runs


def _median(values: Any) -> float | None:
    found = list(values)
    return None if any(value is None for value in found) else float(median(found))
