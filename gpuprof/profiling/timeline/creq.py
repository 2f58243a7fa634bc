"""A model's requirements of a GPU, from its kernels: the three metrics of Creq, bandwidths, and gaps between kernels.

Elvinger's thesis (2024): the largest achieved occupancy of overlapping kernels (§5.2.1, eq. 5.3, after USHER), its
time-weighted average (WAO, §5.3.1), and the time-weighted SM utilisation (WSM, §5.3.2). Without counters, occupancy is
estimated from launches. torch.profiler's own estimate is not used: it is 0 for a block with more than 48 KiB of shared
memory (the limit without opt-in), as in most libraries' kernels for matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.occupancy import Occupancies, cap_occupancy, occupancies
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.timeline import D2H, H2D, LAUNCH, UNKNOWN, Timeline, column

#: Note of runs and settings: the occupancies in use come from launches.
ESTIMATED = "occupancy is estimated from the launches (launch_occupancy_pct), capped by the grid, not counted"
_NEEDED = (*LAUNCH, "registers_per_thread")
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


#: Tolerance for negative gaps, as a part of the latency: clocks differ a little between runs.
_NOISE = 0.05
_MEDIANS = ("max_occupancy_pct", "wavg_occupancy_pct", "wavg_sm_util_pct", "l2_pct", "dram_pct")


def launch_occupancies(kernels: pd.DataFrame, device: Device | None) -> tuple[Occupancies | None, NDArray[np.bool_]]:
    """Return the occupancies of kernel launches, and a mask of the rows of ``kernels`` with a known occupancy.

    ``kernels``: as `gpuprof.profiling.timeline.timeline.Timeline.kernels`.

    Returns
    -------
    Occupancies or None
        Occupancies of the known rows, in order; None without known rows, or if the device's rules are unknown.
    ndarray of bool, shape (n,)
    """
    nothing = np.zeros(len(kernels), dtype=bool)
    if device is None or device.sm is None or not len(kernels):
        return None, nothing
    size = {name: pd.to_numeric(column(kernels, name), errors="coerce") for name in _NEEDED}
    mask = np.logical_and.reduce([values.notna().to_numpy() for values in size.values()])
    mask &= np.logical_and.reduce([(size[name] >= 1).to_numpy() for name in LAUNCH])
    threads = size["block_x"] * size["block_y"] * size["block_z"]
    mask &= (threads <= device.sm.max_threads_per_block).to_numpy()
    mask &= (size["registers_per_thread"] <= device.sm.max_registers_per_thread).to_numpy()
    if not mask.any():
        return None, nothing
    chosen = {
        name: values.to_numpy(dtype=np.float64, na_value=0.0)[mask].astype(np.int64) for name, values in size.items()
    }
    shared = [
        pd.to_numeric(column(kernels, f"{kind}_shared_bytes"), errors="coerce").fillna(0).to_numpy(dtype=np.int64)[mask]
        for kind in ("static", "dynamic")
    ]
    try:
        occupancies_known = occupancies(
            device,
            blocks=chosen["grid_x"] * chosen["grid_y"] * chosen["grid_z"],
            threads_per_block=chosen["block_x"] * chosen["block_y"] * chosen["block_z"],
            registers_per_thread=chosen["registers_per_thread"],
            static_shared_bytes=shared[0],
            dynamic_shared_bytes=shared[1],
        )
    except InputError:  # a compute capability with unknown rules
        return None, nothing
    return occupancies_known, mask


def with_occupancy(kernels: pd.DataFrame, device: Device | None) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the kernels with ``launch_occupancy_pct`` and ``theoretical_occupancy_pct``, and a note.

    The estimate never replaces a counter: ``achieved_occupancy_pct`` stays null without a count.
    """
    estimated, mask = launch_occupancies(kernels, device)
    if estimated is None:
        return kernels, ()
    estimates, theoretical = np.full(len(kernels), np.nan), np.full(len(kernels), np.nan)
    estimates[mask] = estimated.average_occupancy_pct
    theoretical[mask] = estimated.occupancy_pct
    counters = pd.to_numeric(column(kernels, "theoretical_occupancy_pct"), errors="coerce").to_numpy(dtype=np.float64)
    result = kernels.assign(
        launch_occupancy_pct=estimates,
        theoretical_occupancy_pct=np.where(np.isnan(counters), theoretical, counters),
    )
    lacking = int(column(kernels, "achieved_occupancy_pct").isna().sum())
    if not lacking:
        return result, ()
    return result, (ESTIMATED if lacking == len(kernels) else f"{ESTIMATED}: {lacking} of {len(kernels)} have none",)


@dataclass(frozen=True, slots=True)
class GpuRequirement:
    """Figures of a run of a model, medians over the recorded runs; None: not recorded.

    The first profiled run is slower: the profiler allocates and registers. Counts and bytes are means.
    """

    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: The metrics of Creq; overlapping kernels are
    #: summed, to at most 100 (`domain.occupancy.cap_occupancy`). Averages cover the whole execution, including gaps
    #: between kernels, as in the thesis; None if the gaps are unknown.
    max_occupancy_pct: float | None = None
    wavg_occupancy_pct: float | None = None
    wavg_sm_util_pct: float | None = None
    #: ``l2_pct``, ``dram_pct``: Use of L2's and DRAM's bandwidth, weighted by the kernels' times.
    l2_pct: float | None = None
    dram_pct: float | None = None
    kernel_count: float | None = None  #: None if CUDA graphs were recorded without their kernels.
    busy_ms: float | None = None  #: Time in which a kernel ran, or a CUDA graph.
    copy_ms: float = 0.0  #: Time in which a copy or a memset ran and no kernel.
    #: Time in which the device waited for launches: the latency of a run without a profiler, beyond kernels, copies and
    #: memsets. Without such a latency: idle time between the first kernel's start and the last kernel's end, which a
    #: profiler stretches.
    dispatch_ms: float | None = None
    h2d_bytes: float | None = None
    d2h_bytes: float | None = None
    #: Column of ``kernels`` behind the occupancies: ``"achieved_occupancy_pct"`` or ``"launch_occupancy_pct"``.
    occupancy_source: str | None = None
    notes: tuple[str, ...] = ()  #: Refused figures, with the reason.


def compute_requirement(
    kernels: pd.DataFrame, timeline: Timeline | None, device: Device | None, latency_ms: float | None = None
) -> GpuRequirement | None:
    """Return the requirements of a run of the model; None if no kernel has a time.

    A metric is None unless known for every kernel: an average over some of the kernels would describe another model.
    Occupancy is counted if known for all kernels, else estimated from launches.

    Parameters
    ----------
    kernels : DataFrame
        Kernels of the measured runs, with ``repeat``; kernels without ``start_ns`` are left out. If none has a start,
        they were only counted, and only figures independent of time order are given.
    others : Timeline or None
        Copies, memsets and whole graphs of the same runs; None: not recorded.
    device : Device or None
        Device, for SM utilisation.
    latency_ms : float or None
        Latency of a run without a profiler.
    """
    timed = kernels[column(kernels, "start_ns").notna() & column(kernels, "duration_ns").notna()]
    if not len(timed):
        return _counted_requirement(kernels)
    timed = timed.assign(sm_util_pct=_sm_utilization(timed, device))
    source = _occupancy_source(timed)
    runs = [_run_figures(part, timeline, turn, source, latency_ms) for turn, part in timed.groupby("repeat", sort=True)]
    copied = {name: _copied_bytes(timeline, name, len(runs)) for name in (H2D, D2H)}
    busy_ms, copy_ms = (median(run[name] or 0.0 for run in runs) for name in ("busy_ms", "copy_ms"))
    in_trace_ms = median(run["dispatch_ms"] or 0.0 for run in runs)
    dispatch_ms, notes = (in_trace_ms, ()) if latency_ms is None else _gap_ms(latency_ms, busy_ms, copy_ms)
    has_graphs = timeline is not None and len(timeline.graphs) > 0
    return GpuRequirement(
        **{name: None if has_graphs else _median(run[name] for run in runs) for name in _MEDIANS},
        occupancy_source=None if has_graphs else source,
        kernel_count=None if has_graphs else len(timed) / len(runs),
        busy_ms=busy_ms,
        copy_ms=copy_ms,
        dispatch_ms=dispatch_ms,
        h2d_bytes=copied[H2D],
        d2h_bytes=copied[D2H],
        notes=notes,
    )


def _gap_ms(latency_ms: float, busy_ms: float, copy_ms: float) -> tuple[float | None, tuple[str, ...]]:
    """Return the part of a latency in which the device waits for launches; None with a note for impossible values."""
    gap_ms = latency_ms - busy_ms - copy_ms
    if gap_ms >= 0.0:
        return gap_ms, ()
    if gap_ms >= -_NOISE * latency_ms:
        return 0.0, ()
    return None, (
        f"no gap between launches: kernels and copies took {busy_ms + copy_ms:.4g} ms under the profiler, "
        f"and a batch without it {latency_ms:.4g} ms",
    )


def _counted_requirement(kernels: pd.DataFrame) -> GpuRequirement | None:
    """Return the requirements from kernels counted one by one: under ncu kernels never overlap, so gaps are unknown."""
    if not len(kernels) or column(kernels, "duration_ns").isna().any():
        return None
    source = _occupancy_source(kernels)
    occupancy = None if source is None else _complete_column(kernels, source)
    runs = max(1, kernels["repeat"].nunique()) if "repeat" in kernels else 1
    return GpuRequirement(
        max_occupancy_pct=None if occupancy is None else float(occupancy.max()),
        l2_pct=_weighted_mean(kernels, "l2_throughput_pct"),
        dram_pct=_weighted_mean(kernels, "dram_throughput_pct"),
        kernel_count=len(kernels) / runs,
        occupancy_source=source,
    )


def sum_overlapping(starts: Integers, ends: Integers, values: Floats) -> tuple[Integers, Floats, Integers]:
    """Cut time at every start and end, and sum the values running in each interval (thesis §5.3.1, Figure 5.3).

    Parameters
    ----------
    starts, ends : ndarray of int64, shape (n,)
    values : ndarray of float64, shape (n,)

    Returns
    -------
    lengths, sums, counts : ndarray, shape (m,)
        For each interval: length, sum of the values, number of running values.
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
    # The sum of idle intervals is exactly zero, without rounding errors.
    return np.diff(borders), np.where(counts > 0, np.cumsum(change)[:-1], 0.0), counts


def _occupancy_source(kernels: pd.DataFrame) -> str | None:
    """Return the column with the occupancy of all kernels; counters take precedence over launches."""
    names = ("achieved_occupancy_pct", "launch_occupancy_pct")
    return next((name for name in names if _complete_column(kernels, name) is not None), None)


def _run_figures(
    part: pd.DataFrame, timeline: Timeline | None, turn: Any, source: str | None, latency_ms: float | None
) -> dict[str, float | None]:
    def of_turn(*names: str) -> list[pd.DataFrame]:
        tables = [] if timeline is None else [getattr(timeline, name) for name in names]
        return [table[table["repeat"] == turn] for table in tables if len(table)]

    starts, ends = _spans(part)
    occupancy = None if source is None else _complete_column(part, source)
    utilization = _complete_column(part, "sm_util_pct")
    lengths, sums, counts = sum_overlapping(starts, ends, np.zeros(len(part)) if occupancy is None else occupancy)
    busy = _covered_ns([part, *of_turn("graphs")])
    covered = _covered_ns([part, *of_turn("graphs", "copies", "memsets")])
    between = _covered_ns([part, *of_turn("graphs", "copies", "memsets")], int(starts.min()), int(ends.max()))
    whole = max(float(lengths.sum()) if latency_ms is None else latency_ms * 1e6, busy)
    figures: dict[str, float | None] = {
        "busy_ms": busy / 1e6,
        "copy_ms": (covered - busy) / 1e6,
        "dispatch_ms": (float(lengths.sum()) - between) / 1e6,
        "l2_pct": _weighted_mean(part, "l2_throughput_pct"),
        "dram_pct": _weighted_mean(part, "dram_throughput_pct"),
        **dict.fromkeys(("max_occupancy_pct", "wavg_occupancy_pct", "wavg_sm_util_pct")),
    }
    if occupancy is not None and counts.any():
        sums = cap_occupancy(sums)
        figures["max_occupancy_pct"] = float(sums[counts > 0].max())
        figures["wavg_occupancy_pct"] = float((lengths * sums).sum() / whole)
    if utilization is not None and counts.any():
        lengths, sums, _ = sum_overlapping(starts, ends, utilization)
        figures["wavg_sm_util_pct"] = float((lengths * cap_occupancy(sums)).sum() / whole)
    return figures


def _spans(part: pd.DataFrame) -> tuple[Integers, Integers]:
    starts = part["start_ns"].to_numpy(dtype=np.int64)
    return starts, starts + np.maximum(part["duration_ns"].to_numpy(dtype=np.int64), 0)


def _covered_ns(tables: list[pd.DataFrame], first: int | None = None, last: int | None = None) -> float:
    """Return the time during which some event of the tables ran, between ``first`` and ``last`` if given."""
    spans = [_spans(table) for table in tables]
    starts, ends = (np.concatenate(parts) for parts in zip(*spans, strict=True))
    if first is not None and last is not None:
        starts, ends = np.clip(starts, first, last), np.clip(ends, first, last)
    lengths, _, counts = sum_overlapping(starts, ends, np.zeros(len(starts)))
    return float(lengths[counts > 0].sum())


def _sm_utilization(kernels: pd.DataFrame, device: Device | None) -> Floats:
    occupancies, mask = launch_occupancies(kernels, device)
    values = np.full(len(kernels), np.nan)
    if occupancies is not None:
        values[mask] = occupancies.sm_utilization_pct
    return values


def _complete_column(part: pd.DataFrame, name: str) -> Floats | None:
    values = column(part, name)
    return None if values.isna().any() or not len(values) else values.to_numpy(dtype=np.float64)


def _weighted_mean(part: pd.DataFrame, name: str) -> float | None:
    values, weights = _complete_column(part, name), part["duration_ns"].to_numpy(dtype=np.float64)
    return None if values is None or not weights.sum() else float(np.average(values, weights=weights))


def _copied_bytes(timeline: Timeline | None, direction: str, runs: int) -> float | None:
    """Return the bytes copied per run; None if copies, their direction or their size were not recorded."""
    if timeline is None or (timeline.copies["direction"] == UNKNOWN).any():
        return None
    copied = timeline.copies.loc[timeline.copies["direction"] == direction, "bytes"]
    return None if copied.isna().any() else float(copied.sum()) / runs


def _median(values: Any) -> float | None:
    numbers = list(values)
    return None if any(value is None for value in numbers) else float(median(numbers))
