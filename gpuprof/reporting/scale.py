"""Scales of axes: pixels of values, and positions of ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.reporting.chart import Axis

_LEAST = 1e-30  # of a logarithmic axis
_LEAST_TICKS = 3  # fewer do not show that an axis is logarithmic
#: Candidate ticks within a decade; the second set serves where the first gives too few.
_LOG_FACTORS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7))


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels [begin, end]."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside are moved to the nearer end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return the labelled values."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def scale_of(axis: Axis, values: Sequence[float], begin: float, end: float) -> Scale:
    """Return the scale of an axis for these values; ends given by the axis take precedence."""
    finite = [value for value in values if math.isfinite(value) and (value > _LEAST or not axis.log)]
    low = axis.low if axis.low is not None else min(finite, default=1.0 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(finite, default=low + 1.0)
    if axis.names:
        return Scale(-0.5, len(axis.names) - 0.5, begin, end, False)
    if axis.log:
        low, high = (low / 1.2 if axis.low is None else low), (high * 1.2 if axis.high is None else high)
        return Scale(low, max(high, low * 1.5), begin, end, True)
    if axis.low is None and low > 0 and low < 0.5 * high:
        low = 0.0
    # All values equal: an axis of no length would divide by zero.
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) if abs(low) > 1e-9 else 1.0)
    return Scale(low, high if axis.high is not None else low + (high - low) * 1.05, begin, end, False)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    # A tolerance below the step, so that rounding does not skip to the next factor.
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 8)
    for factors in _LOG_FACTORS if last - first <= 3 else ((1,),):
        ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= _LEAST_TICKS or last - first > 3:
            return inside
    return _linear_ticks(low, high)  # a small part of a decade


def tick_text(value: float) -> str:
    """Return a short text for a number: 2.5, 30k, 1.2M, 5e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):g}{suffix}"
    return f"{value:g}"
