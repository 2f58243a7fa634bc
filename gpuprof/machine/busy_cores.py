"""Busy cores of this machine, from the kernel's counters in ``/proc/stat``, and what disturbs a measurement on them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from gpuprof.machine.lost_time import StolenTime

_STAT = Path("/proc/stat")


def busy_cores(seconds: float, cores: Collection[int], stat: Path = _STAT) -> float | None:
    """Return the mean number of busy cores among ``cores`` over ``seconds``; None without kernel counters."""
    load = MachineLoad(cores, stat)
    time.sleep(seconds)
    return load.busy_cores()


class MachineLoad:
    """Use of some cores by all programs, from its creation on.

    ``stat``: path of the kernel's counters.
    """

    def __init__(self, cores: Collection[int], stat: Path = _STAT) -> None:
        self._cores, self._stat = tuple(cores), stat
        self._stolen = StolenTime(stat)
        self._before = _read_times(stat)

    def busy_cores(self) -> float | None:
        """Return the mean number of busy cores since the beginning; None without kernel counters."""
        return None if (ticks := self._count_ticks()) is None else ticks[0] / ticks[1] * len(self._cores)

    def describe_disturbance(self, own_cores: float | None, tolerance: float) -> str | None:
        """Return a remark on programs, or a hypervisor, that took more than a part ``tolerance`` of the cores' time.

        ``own_cores``: cores kept busy by the measurement itself; None: other programs do not matter, as on a GPU.
        """
        ticks, stolen = self._count_ticks(), self._stolen.part()
        if ticks is not None and own_cores is not None:
            busy, total = ticks
            # Each core's counter is rounded to a tick.
            foreign = busy - own_cores * total / len(self._cores) - len(self._cores)
            if foreign > tolerance * total:
                cores = foreign / total * len(self._cores)
                return (
                    f"other programs kept {cores:.1f} of the {len(self._cores)} cores busy meanwhile "
                    f"(load average {os.getloadavg()[0]:.1f})"
                )
        if stolen is not None and stolen > tolerance:
            return f"the hypervisor gave {100.0 * stolen:.0f}% of this machine's time to others meanwhile"
        return None

    def _count_ticks(self) -> tuple[int, int] | None:
        """Return the busy ticks and all ticks of the cores since the beginning."""
        after = _read_times(self._stat)
        pairs = [(self._before[core], after[core]) for core in self._cores if core in self._before and core in after]
        busy, total = (sum(new[place] - old[place] for old, new in pairs) for place in (0, 1))
        return (busy, total) if total > 0 else None


def _read_times(stat: Path) -> dict[int, tuple[int, int]]:
    """Return (busy, all) ticks by core."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    times = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and len(fields) >= 8:
            # Columns of proc(5); guest time follows, and is contained in the first two.
            user, nice, system, idle, iowait, irq, softirq, stolen = map(int, fields[:8])
            busy = user + nice + system + irq + softirq  # stolen ticks are `lost_time`'s
            times[int(name[3:])] = (busy, busy + idle + iowait + stolen)
    return times
