"""A measured quantity over batch size: linear between the measured sizes, undefined outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, Figure


class BatchCurve:
    """A piecewise linear function of the batch size.

    Time is nearly a constant plus a part in proportion to the batch, for which linear interpolation is exact; monotone
    data stay monotone. ``values``: batch size → measured value; at least one.

    Examples
    --------
    >>> curve = BatchCurve({1: 2.0, 8: 9.0})
    >>> curve.at(8), curve.at(4), curve.at(16)
    ((9.0, 'measured'), (5.0, 'interpolated'), None)
    >>> curve.extrapolate(16)
    Figure(value=17.0, source='extrapolated', low=9.0, high=18.0)
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        self.batches = tuple(sorted(values))
        self.values = tuple(values[batch] for batch in self.batches)

    def at(self, batch: int) -> tuple[float, str] | None:
        """Return the value with its source, measured or interpolated; None outside the measured range."""
        place = bisect_left(self.batches, batch)
        if place < len(self.batches) and self.batches[place] == batch:
            return self.values[place], MEASURED
        if place in (0, len(self.batches)):
            return None
        return self._line(place - 1, place, batch), INTERPOLATED

    def beyond(self, batch: int) -> float:
        """Return the value on the line through the nearest two points, never below those of smaller batches."""
        if len(self.batches) == 1:
            return self.values[0] * max(1.0, batch / self.batches[0])
        if batch > self.batches[-1]:
            return max(self._line(-2, -1, batch), self.values[-1])
        return max(self._line(0, 1, batch), self.values[0] * batch / self.batches[0])

    def extrapolate(self, batch: int) -> Figure:
        """Return the figure beyond the measured batches: non-decreasing in the batch, and at most in proportion."""
        nearest = 0 if batch < self.batches[0] else -1
        ends = self.values[nearest], self.values[nearest] * batch / self.batches[nearest]
        return Figure(min(self.beyond(batch), max(ends)), EXTRAPOLATED, min(ends), max(ends))

    def left_out_errors(self) -> list[float]:
        """Return the relative error at each inner point, predicted from its neighbours."""
        return [
            abs(self._line(i - 1, i + 1, self.batches[i]) / self.values[i] - 1.0)
            for i in range(1, len(self.batches) - 1)
            if self.values[i] > 0.0
        ]

    def end_errors(self) -> list[float]:
        """Return the relative error at the largest batch, extrapolated from the two before."""
        if len(self.batches) < 3 or self.values[-1] <= 0.0:
            return []
        predicted = BatchCurve(dict(zip(self.batches[:-1], self.values[:-1], strict=True))).beyond(self.batches[-1])
        return [abs(predicted / self.values[-1] - 1.0)]

    def _line(self, left: int, right: int, batch: int) -> float:
        x0, x1, y0, y1 = self.batches[left], self.batches[right], self.values[left], self.values[right]
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)
