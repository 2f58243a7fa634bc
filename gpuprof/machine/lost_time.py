"""Time that a machine's processes lose: stolen by the hypervisor for others, and late wake-ups.

A process that is due while its virtual core is not running waits until it is, for milliseconds. On average that is
little; the 99th percentile of a latency is made of it.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
#: Columns of the line of all cores behind its name (proc(5)); later ones, guests' time, are contained in the first two.
_STOLEN, _USED = 7, 8
_NAP_S = 0.002
#: How often the cores are read while spans are recorded; the kernel counts in hundredths of a second.
_READ_S = 0.02


class StolenTime:
    """Measures, from its creation, the fraction of this machine's CPU time that the hypervisor gives to others.

    ``stat``: the kernel's file.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = _read_ticks(stat)

    def part(self) -> float | None:
        """Return the part since the beginning; None where the kernel does not say."""
        after = _read_ticks(self._stat)
        if self._before is None or after is None or after[1] <= self._before[1]:
            return None
        return (after[0] - self._before[0]) / (after[1] - self._before[1])


@dataclass(frozen=True, slots=True)
class StolenSpan:
    """A core did not run for ``lasts_s`` seconds from ``at_s`` on, on the monotonic clock."""

    core: int
    at_s: float
    lasts_s: float


class StolenSpanRecorder:
    """Records on a background thread, between entry and exit, when the hypervisor gave which core to others.

    The kernel tells of stolen time once it is over: a span ends when it is first seen, at most ``every_s`` seconds
    late.
    """

    def __init__(self, stat: Path = _STAT, every_s: float = _READ_S) -> None:
        self._stat, self._every_s = stat, every_s
        self._spans: list[StolenSpan] = []
        self._before: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._record, name="stolen time", daemon=True)

    def __enter__(self) -> Self:
        """Begin to record."""
        self._before = _read_core_ticks(self._stat)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Record for the last time."""
        self._over.set()
        self._thread.join()

    @property
    def spans(self) -> tuple[StolenSpan, ...]:
        """What was recorded, by time; nothing where the kernel does not say."""
        return tuple(self._spans)

    def _record(self) -> None:
        is_over = not self._before
        while not is_over:
            is_over = self._over.wait(self._every_s)
            now, ticks = time.monotonic(), _read_core_ticks(self._stat)
            for core, count in ticks.items():
                lasts_s = (count - self._before.get(core, count)) / os.sysconf("SC_CLK_TCK")
                if lasts_s > 0.0:
                    self._spans.append(StolenSpan(core, now - lasts_s, lasts_s))
            self._before = ticks


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
        name, *fields = stat.read_text(encoding="ascii").splitlines()[0].split()
        ticks = [int(field) for field in fields[:_USED]]
    except (OSError, ValueError, IndexError):
        return None
    return (ticks[_STOLEN], sum(ticks)) if name == "cpu" and len(ticks) == _USED else None


def _read_core_ticks(stat: Path) -> dict[int, int]:
    """Return the stolen ticks of each core; none where the kernel does not say."""
    try:
        rows = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        cores = [row for row in rows if row and row[0].startswith("cpu") and row[0] != "cpu"]
        return {int(row[0].removeprefix("cpu")): int(row[1 + _STOLEN]) for row in cores}
    except (OSError, ValueError, IndexError):
        return {}
