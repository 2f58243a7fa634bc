"""Scales of axes: pixels of values, and positions of ticks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.reporting.chart import Axis


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels [begin, end]."""

    low: float
    high: float
    begin: float
    end: float
    axis: Axis

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside are moved to the nearer end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.axis.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return the labelled values."""
        if self.axis.log:
            return _log_ticks(self.low, self.high)
        return _linear_ticks(self.low, self.high, 1.0 if self.axis.is_count else 0.0)


def scale_of(axis: Axis, values: Sequence[float], begin: float, end: float) -> Scale:
    """Return the scale of an axis for these values; ends given by the axis take precedence."""
    if axis.names:
        return Scale(-0.5, len(axis.names) - 0.5, begin, end, axis)
    finite = [value for value in values if math.isfinite(value) and (value > sys.float_info.min or not axis.log)]
    low = axis.low if axis.low is not None else min(finite, default=1.0 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(finite, default=low + 1.0)
    if axis.log:
        low, high = (low / 1.2 if axis.low is None else low), (high * 1.2 if axis.high is None else high)
        return Scale(low, max(high, low * 1.5), begin, end, axis)
    if axis.low is None and 0.0 < low < 0.5 * high:
        low = 0.0
    if math.isclose(low, high, abs_tol=1e-9):  # an axis of no length would divide by zero
        high = low + max(1.0, abs(low))
    return Scale(low, high if axis.high is not None else low + (high - low) * 1.05, begin, end, axis)


def _linear_ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
    raw = max((high - low) / 5, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, (last - first) // 8)
    ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    visible = [tick for tick in ticks if low <= tick <= high]
    return visible if len(visible) > 2 else _linear_ticks(low, high)


def tick_text(value: float) -> str:
    """Return a short text for a number: 2.5, 30k, 1.2M, 5e-06."""
    for limit, unit, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
