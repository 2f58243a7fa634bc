"""Mean number of busy cores of this machine, from the kernel's counters in ``/proc/stat``."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
# Columns after the name (proc(5)). Later columns (guest time) are contained in the first two.
_IDLE, _IOWAIT, _STOLEN, _USED = 3, 4, 7, 8


def busy_cores(seconds: float, cores: Collection[int], stat: Path = _STAT) -> float | None:
    """Return the mean number of busy cores among ``cores`` over ``seconds``; None without kernel counters."""
    before = _read_times(stat)
    time.sleep(seconds)
    return busy_between(before, _read_times(stat), cores)


def busy_between(
    before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]], cores: Collection[int]
) -> float | None:
    """Return the mean number of busy cores between two readings of (busy, all) ticks by core; None: unknown."""
    busy, known = 0.0, False
    for core in cores:
        if core in before and core in after:
            ticks = after[core][1] - before[core][1]
            if ticks > 0:
                known = True
                busy += (after[core][0] - before[core][0]) / ticks
    return busy if known else None


def _read_times(stat: Path) -> dict[int, tuple[int, int]]:
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    times = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and len(fields) >= _USED:
            ticks = [int(field) for field in fields[:_USED]]
            idle = ticks[_IDLE] + ticks[_IOWAIT] + ticks[_STOLEN]  # stolen ticks are `lost_time`'s
            times[int(name[3:])] = (sum(ticks) - idle, sum(ticks))
    return times
