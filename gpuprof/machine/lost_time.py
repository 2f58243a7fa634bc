"""Time lost by a machine's processes: stolen by the hypervisor, and late wake-ups.

A process that becomes runnable while its virtual core is descheduled waits for milliseconds. This is little on average
but determines the 99th percentile of a latency.
"""

from __future__ import annotations

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_NAP_S = 0.002


class StolenTime:
    """Measures, from its creation, the fraction of this machine's CPU time stolen by the hypervisor.

    ``stat``: path of the kernel's counters.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = _read_ticks(stat)

    def part(self) -> float | None:
        """Return the stolen fraction since the beginning; None without kernel counters."""
        after = _read_ticks(self._stat)
        if self._before is None or after is None or after[1] <= self._before[1]:
            return None
        return (after[0] - self._before[0]) / (after[1] - self._before[1])


def measure_lateness(seconds: float) -> float:
    """Sleep repeatedly for ``seconds`` in all, and return the 99th percentile of the wake-up delay in milliseconds."""
    late_ms = []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        time.sleep(_NAP_S)
        late_ms.append(1000.0 * (time.monotonic() - began - _NAP_S))
    return sorted(late_ms)[-1 - len(late_ms) // 100] if late_ms else 0.0


def _read_ticks(stat: Path) -> tuple[int, int] | None:
    """Return stolen and all ticks of all cores together."""
    try:
        # Columns of proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guest time is contained in them.
        name, *fields = stat.read_text(encoding="ascii").splitlines()[0].split()
        *fields_but_stolen, stolen = [int(field) for field in fields[:8]]
    except (OSError, ValueError, IndexError):
        return None
    return (stolen, stolen + sum(fields_but_stolen)) if name == "cpu" and len(fields_but_stolen) == 7 else None
