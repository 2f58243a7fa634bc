"""Stalls of the router's event loop, during which the silence of workers is no sign of a hang."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

_BEAT_S = 0.05
#: Lateness below this is the system's.
_LEAST_S = 0.05
_REMEMBERED = 256


class StallMeter:
    """Measures the delay of the event loop's timers.

    ``now``: monotonic seconds at the beginning.

    Attributes
    ----------
    count : int
    longest_s, total_s : float
        Ended stalls; the total is never reset, the others are by `forget`.
    longest_own_s, longest_computed_s : float
        Maximum over stalls of the time without waiting for a core that others had, and of the loop thread's processor
        time.
    """

    def __init__(self, now: float) -> None:
        self.count = 0
        self.total_s = self.longest_s = self.longest_own_s = self.longest_computed_s = 0.0
        self._computed_s = self._waited_s = 0.0
        self._due = now + _BEAT_S
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def forget(self) -> None:
        """Reset the counts: stalls during the server's start, including a current stall, delay no request."""
        self._observe_now()
        self.count, self.longest_s, self.longest_own_s, self.longest_computed_s = 0, 0.0, 0.0, 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._observe_now()

    def _observe_now(self) -> None:
        self.observe_tick(time.monotonic(), time.thread_time(), read_waited_s())

    def observe_tick(self, now: float, computed_s: float, waited_s: float) -> None:
        """Record a run of the timer; ``computed_s``, ``waited_s``: its thread's total CPU time and wait for a core."""
        late_s, computed, waited = now - self._due, computed_s - self._computed_s, waited_s - self._waited_s
        self._due, self._computed_s, self._waited_s = now + _BEAT_S, computed_s, waited_s
        if late_s > _LEAST_S:
            self.count += 1
            self.total_s += late_s
            self.longest_s = max(self.longest_s, late_s)
            self.longest_own_s = max(self.longest_own_s, late_s - waited)
            self.longest_computed_s = max(self.longest_computed_s, min(late_s, computed))
            self._ended.append((now, late_s))

    def stalled_since(self, moment: float, now: float) -> float:
        """Return the seconds of stalls that ended after ``moment``, including a current stall."""
        late_s = now - self._due
        return sum(size for end, size in self._ended if end > moment) + (late_s if late_s > _LEAST_S else 0.0)

    def awake_s(self, now: float) -> float:
        """Return a clock without the time of stalls."""
        late_s = now - self._due
        return now - self.total_s - (late_s if late_s > _LEAST_S else 0.0)


def read_waited_s(thread: int | str = "thread-self") -> float:
    """Return the total time for which a thread was ready but had no core; 0 where the system does not report it.

    ``thread``: thread id, by default this thread; a process id means its first thread.
    """
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
