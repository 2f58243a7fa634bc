"""Latency beside others, from what ran beside what in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuprof.device import Device
from gpuprof.estimate import MEASURED, Figure, Workload
from gpuprof.estimators.curve import quantile
from gpuprof.kernel_db.schema import workload_label
from gpuprof.kernel_db.store import KernelDb

#: Slowdown assumed at most where nothing was co-located on the device: the worst pairs of iGniter's section 2.2.
_WORST_ASSUMED = 1.35
_ENOUGH_ROWS = 4
_COLUMNS = ("device", "model", "batch", "sm_share_pct", "mig_profile", "processes", "beside", "latency_mean_ms",
            "solo_latency_mean_ms", "error")  # fmt: skip


class Colocations:
    """Slowdowns measured on each device.

    A workload measured beside exactly these others has that slowdown; any other has the median of the device's
    with as many others or fewer, and where nothing was co-located on the device, none, with a wide interval.
    """

    def __init__(self, db: KernelDb | None) -> None:
        self._by_device: dict[str, list[tuple[str, tuple[str, ...], float]]] = {}
        for row in db.read("colocations", columns=list(_COLUMNS)).to_pylist() if db is not None else ():
            if row["error"] is None and row["latency_mean_ms"] and row["solo_latency_mean_ms"]:
                slowdown = row["latency_mean_ms"] / row["solo_latency_mean_ms"]
                self._by_device.setdefault(row["device"], []).append((_row_label(row), _others(row), slowdown))

    def beside(self, alone: Figure, device: Device, workload: Workload, beside: Sequence[Workload]) -> Figure:
        """Return the latency of ``workload`` beside others from its latency alone."""
        rows = self._by_device.get(device.name, [])
        wanted = (_label(workload), tuple(sorted(map(_label, beside))))
        same = [slowdown for label, others, slowdown in rows if (label, others) == wanted]
        if same:
            factor = sum(same) / len(same)
            source = MEASURED if alone.source == MEASURED else alone.source
            return Figure(alone.scaled(factor).value, source, *_ends(alone, factor, factor))
        seen = sorted(slowdown for _, others, slowdown in rows if len(others) <= len(beside))
        if len(seen) < _ENOUGH_ROWS:
            return Figure(alone.value, alone.source, *_ends(alone, 1.0, _WORST_ASSUMED))
        middle = seen[len(seen) // 2]
        low, high = seen[int(0.05 * len(seen))], quantile(seen, 0.95) or middle
        return Figure(alone.value * middle, "co-location", *_ends(alone, low, high))


def _ends(alone: Figure, least: float, most: float) -> tuple[float, float]:
    low = alone.value if alone.low is None else alone.low
    return low * least, alone.upper() * most


def _label(workload: Workload) -> str:
    share = workload.share
    return workload_label(workload.model, workload.batch, share.sm_pct, share.mig, workload.processes)


def _row_label(row: Mapping[str, Any]) -> str:
    return workload_label(row["model"], row["batch"], row["sm_share_pct"], row["mig_profile"], row["processes"])


def _others(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(row["beside"].split(" + ")))
