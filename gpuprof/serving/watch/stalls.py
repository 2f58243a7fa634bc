"""Stalls of the router's event loop, during which the silence of workers is no sign of a hang."""

from __future__ import annotations

import asyncio
import time
from collections import deque

#: Interval of the timer, and the least lateness that counts: less is the system's.
_BEAT_S = 0.05
_REMEMBERED = 256


class StallMeter:
    """Measures the delay of the event loop's timers.

    ``now``: monotonic seconds at the beginning.

    Attributes
    ----------
    count : int
    longest_s, total_s : float
        Ended stalls; the total is never reset, the others are by `forget`.
    """

    def __init__(self, now: float) -> None:
        self.count = 0
        self.total_s = self.longest_s = 0.0
        self._due = now + _BEAT_S
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def forget(self) -> None:
        """Reset the counts: stalls during the server's start, including a current stall, delay no request."""
        self.observe_tick(time.monotonic())
        self.count, self.longest_s = 0, 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.observe_tick(time.monotonic())

    def observe_tick(self, now: float) -> None:
        """Record a run of the timer."""
        late_s = now - self._due
        self._due = now + _BEAT_S
        if late_s > _BEAT_S:
            self.count += 1
            self.total_s += late_s
            self.longest_s = max(self.longest_s, late_s)
            self._ended.append((now, late_s))

    def stalled_since(self, moment: float, now: float) -> float:
        """Return the seconds of stalls that ended after ``moment``, including a current stall."""
        late_s = now - self._due
        return sum(size for end, size in self._ended if end > moment) + (late_s if late_s > _BEAT_S else 0.0)
