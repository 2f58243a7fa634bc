"""Use of this machine's cores by all programs, and time stolen by the hypervisor.

A process that becomes runnable while its virtual core is descheduled waits for milliseconds: little on average, but it
determines the 99th percentile of a latency.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
_ALL = "cpu"  # the kernel's sum over all cores


class MachineLoad:
    """Use of some cores, and of the whole machine, from its creation on.

    ``stat``: path of the kernel's counters.
    """

    def __init__(self, cores: Collection[int] = (), stat: Path = _STAT) -> None:
        self._cores, self._stat = tuple(cores), stat
        self._before = _read_times(stat)

    def busy_cores(self) -> float | None:
        """Return the mean number of busy cores since the beginning; None without kernel counters."""
        return None if (ticks := self._count_ticks()) is None else ticks[0] / ticks[1] * len(self._cores)

    def stolen_part(self) -> float | None:
        """Return the fraction of the machine's time that was stolen since the beginning; None without counters."""
        before, after = self._before.get(_ALL), _read_times(self._stat).get(_ALL)
        if before is None or after is None or after[1] <= before[1]:
            return None
        return (after[2] - before[2]) / (after[1] - before[1])

    def describe_disturbance(self, own_cores: float | None, tolerance: float) -> str | None:
        """Return a remark on programs, or a hypervisor, that took more than a part ``tolerance`` of the cores' time.

        ``own_cores``: cores kept busy by the measurement itself; None: other programs do not matter, as on a GPU.
        """
        ticks, stolen = self._count_ticks(), self.stolen_part()
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
        names = [name for core in self._cores if (name := f"cpu{core}") in self._before and name in after]
        busy, total = (sum(after[name][place] - self._before[name][place] for name in names) for place in (0, 1))
        return (busy, total) if total > 0 else None


def _read_times(stat: Path) -> dict[str, tuple[int, int, int]]:
    """Return (busy, all, stolen) ticks by core, and of all cores together."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    times = {}
    for line in lines:
        name, *fields = line.split() or [""]
        if name.startswith(_ALL) and len(fields) >= 8 and all(field.isdigit() for field in fields[:8]):
            # Columns of proc(5); guest time follows, and is contained in the first two.
            user, nice, system, idle, iowait, irq, softirq, stolen = map(int, fields[:8])
            busy = user + nice + system + irq + softirq
            times[name] = (busy, busy + idle + iowait + stolen, stolen)
    return times
