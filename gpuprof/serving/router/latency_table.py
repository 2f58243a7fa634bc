"""Expected batch times: the map's predictions, corrected by recent measurements.

There are two corrections: a factor for batches of all sizes, since most slow-downs affect all sizes, and a further
factor for each size. Every observation changes them by a bounded amount, however long the batch took: a worker that
was suspended for a second says nothing about the next batch. Without observations the corrections fade, so that
requests refused for a wrong estimate are admitted again; and a request that finds a worker idle is always admitted
(`gpuprof.rules.routing.is_refused`), which gives a new observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_WEIGHT = 0.05  # weight of a batch in the running means
#: Maximum ratio of measured to expected time in the means; its reciprocal is the minimum.
_CLIP = 2.0
#: Time without an observation after which a correction begins to fade, and the half-life of the fading.
_SILENCE_S, _HALF_LIFE_S = 1.0, 1.5
#: Interval at which the table follows its corrections.
_REFRESH_S = 0.01


class LatencyTable:
    """Expected time of a batch of 1, 2, … rows.

    Parameters
    ----------
    batch : int
        Largest batch.
    predicted_ms : sequence of float or None
        By number of rows; None: unknown until measured.
    now : float
        Seconds on any clock that goes on.
    """

    def __init__(self, batch: int, predicted_ms: Sequence[float] | None = None, now: float = 0.0) -> None:
        base = list(predicted_ms or ())[:batch]
        self._base = base + [base[-1] if base else 0.0] * (batch - len(base))
        self._is_predicted = bool(base) and base[0] > 0.0
        self._common = _Correction(now)
        self._by_rows = [_Correction(now) for _ in range(batch)]
        self._times = list(self._base)
        self._fresh_until = now

    def times_ms(self, now: float) -> Sequence[float]:
        """Return the times by rows, up to the largest batch; 0 for unknown times."""
        if now >= self._fresh_until:
            factor = self._common.at(now)
            self._times = [time * factor * ratio.at(now) for time, ratio in zip(self._base, self._by_rows, strict=True)]
            self._fresh_until = now + _REFRESH_S
        return self._times

    def observe(self, rows: int, ms: float, now: float) -> None:
        """Record that a batch of ``rows`` took ``ms``; unknown sizes are assumed in proportion."""
        if not self._base[rows - 1]:
            for size in range(1, len(self._base) + 1):
                self._base[size - 1] = self._base[size - 1] or ms * max(1.0, size / rows)
            self._fresh_until = now
        base, expected = self._base[rows - 1], self.times_ms(now)[rows - 1]
        if base <= 0.0:
            return
        if expected > 0.0:
            ms = min(max(ms, expected / _CLIP), expected * _CLIP)
        factor = self._common.observe(ms / base, now)
        self._by_rows[rows - 1].observe(ms / base / factor, now)
        if not self._is_predicted:  # without predictions the corrections fade towards measured times
            self._base = [(1.0 + _WEIGHT * (factor - 1.0)) * time for time in self._base]


class _Correction:
    """A running mean of a ratio, fading to 1 without observations."""

    __slots__ = ("_ratio", "_seen")

    def __init__(self, now: float) -> None:
        self._ratio = 1.0
        self._seen = now

    def at(self, now: float) -> float:
        """Return the factor at a time: the last mean, faded where nothing was observed since."""
        silent_s = now - self._seen - _SILENCE_S
        if silent_s <= 0.0 or self._ratio == 1.0:
            return self._ratio
        return 1.0 + (self._ratio - 1.0) * math.exp2(-silent_s / _HALF_LIFE_S)

    def observe(self, ratio: float, now: float) -> float:
        """Record a ratio of measured to predicted time; return the new mean."""
        before = self._ratio if now <= self._seen + _SILENCE_S else self.at(now)
        self._ratio = before + _WEIGHT * (ratio - before)
        self._seen = now
        return self._ratio
