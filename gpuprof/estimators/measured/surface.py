"""Figures from measured points: interpolated over batches, shares and sizes, carried beyond them, with their errors."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    COMPUTED,
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    Figure,
    Workload,
    classify_source,
    is_unstable,
    mark_source,
)
from gpuprof.domain.share import Share
from gpuprof.estimators.conformal import (
    ENOUGH_MODELS,
    LEVEL,
    common_factor,
    interval_factor,
    left_out_residuals,
    quantile,
)
from gpuprof.estimators.constants import constant
from gpuprof.estimators.measured.measured import MeasuredModel, Point, blend_measured, shares_of


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


def figure_within(value: float, source: str, error: float | None) -> Figure:
    """Return the figure with the interval of a relative error: as far below by division as above.

    Examples
    --------
    >>> figure = figure_within(10.0, "learned", 0.25)
    >>> figure.low, figure.high
    (8.0, 12.5)
    """
    return Figure(value, source) if error is None else Figure(value, source, value / (1 + error), value * (1 + error))


def blend_figures(parts: Sequence[tuple[Figure, float]]) -> Figure:
    """Return the weighted mean of figures: interpolated if all are measured, interpolated or computed.

    Examples
    --------
    >>> blend_figures([(Figure(4.0, "measured"), 0.5), (Figure(8.0, "measured"), 0.5)])
    Figure(value=6.0, source='interpolated', low=None, high=None)
    """
    sources = {classify_source(figure.source) for figure, _ in parts}
    source = mark_source(
        INTERPOLATED if sources <= {MEASURED, INTERPOLATED, COMPUTED} else EXTRAPOLATED,
        stable=not any(is_unstable(figure.source) for figure, _ in parts),
        computed=COMPUTED in sources,
    )
    value = math.fsum(weight * figure.value for figure, weight in parts)
    if all(figure.low is None for figure, _ in parts):
        return Figure(value, source)
    low = math.fsum(weight * (figure.value if figure.low is None else figure.low) for figure, weight in parts)
    return Figure(value, source, low, math.fsum(weight * figure.upper() for figure, weight in parts))


def widen_by(figure: Figure, error: float) -> Figure:
    """Return the figure with its interval wider by a relative error at both ends."""
    low = figure.value if figure.low is None else figure.low
    return replace(figure, low=low / (1.0 + error), high=figure.upper() * (1.0 + error))


def widen_interval(figure: Figure, more: float) -> Figure:
    """Return the figure with the upper end ``more`` higher; without an interval, the lower end at the same factor."""
    if not more:
        return figure
    high = figure.upper() + more
    return replace(figure, low=figure.value**2 / high if figure.low is None else figure.low, high=high)


def figure_of(model: MeasuredModel, device: Device, workload: Workload, column: str) -> Figure | None:
    """Return another measured quantity at the same share and processes, interpolated over the batch and the sizes."""
    if not model.points.get(device.name):
        each = [(figure_of(m, device, workload, column), weight) for m, weight in blend_measured(model, device.name)]
        found_all = [(figure, weight) for figure, weight in each if figure is not None]
        return blend_figures(found_all) if found_all and len(found_all) == len(each) else None
    points = {
        p.batch: p.figures[column]
        for p in model.points.get(device.name, [])
        if column in p.figures and p.share == workload.share and p.processes == workload.processes
    }
    reading = BatchCurve(points).at(workload.batch) if points else None
    return None if reading is None else Figure(*reading)


def estimate_bandwidth(
    model: MeasuredModel, device: Device, workload: Workload, column: str, alone_ms: float
) -> float | None:
    """Return a workload's percent of a bandwidth alone: measured, or by the traffic per request of the
    nearest point.
    """
    exact = figure_of(model, device, workload, column)
    if exact is not None:
        return exact.value
    points = [point for point in model.points.get(device.name, []) if column in point.figures]
    if not points:
        return None
    nearest = min(
        points, key=lambda p: (abs(math.log2(p.batch / workload.batch)), abs(p.share.sm_pct - workload.share.sm_pct))
    )
    each = nearest.figures[column] * nearest.latency_ms / (nearest.batch * nearest.processes)
    return min(100.0, each * workload.batch * workload.processes / alone_ms)


def behaviour_after_pause(model: MeasuredModel, device: Device, workload: Workload, cv: float) -> tuple[float, float]:
    """Return pause factor and variation of the nearest measured batch, under the same share if measured."""
    points = model.points.get(device.name) or [p for m in model.others for p in m.points.get(device.name, ())]
    near = [point for point in points if point.share == workload.share] or points
    if not near:
        return 1.0, cv
    nearest = min(near, key=lambda point: abs(point.batch - workload.batch))
    return nearest.pause_factor, nearest.pause_cv


#: Least time of an execution in ms by batch and share, up to a factor; scales measured points to other workloads.
Shape = Callable[[int, Share], float]


class Surface:
    """Latency of a model with a given number of processes over batch size and share.

    ``points``: of one model, device and number of processes; at least one.
    """

    def __init__(self, points: Sequence[Point], device: Device) -> None:
        self.points = {(point.batch, point.share): point for point in points}
        self.curves = {
            share: BatchCurve({p.batch: p.latency_ms for p in points if p.share == share})
            for share in shares_of(points)
        }
        self._device = device
        self._fractions = {point.share: point.granted_fraction(device) for point in points}

    def read_latency(self, batch: int, share: Share, shape: Callable[[], Shape | None]) -> tuple[float, str]:
        """Return the latency, measured or interpolated between batches or shares, else carried over, and its source.

        ``shape`` is called only in the last case.
        """
        if share in self.curves and (reading := self.curves[share].at(batch)):
            return reading
        between = self._between_shares(batch, share)
        return between or self._extrapolate_point(batch, share, shape())

    def nearest(self, batch: int, share: Share) -> Point:
        """Return the measured point nearest in doublings of batch and share; among equals, that of the larger batch.

        A share of another kind of partition is one doubling further away.
        """
        fraction = self._device.granted_fraction(share)

        def distance(point: Point) -> tuple[float, int]:
            doublings = abs(math.log2(point.granted_fraction(self._device) / fraction)) + abs(
                math.log2(point.batch / batch)
            )
            # To nine decimals, since equal distances differ by rounding.
            return round(doublings + ((point.share.mig or "") != (share.mig or "")), 9), -point.batch

        return min(self.points.values(), key=distance)

    def _between_shares(self, batch: int, share: Share) -> tuple[float, str] | None:
        """Interpolate between the measured shares around ``share``, both logarithms being nearly a line."""
        points = [
            (self._fractions[curve_share], reading[0])
            for curve_share, curve in self.curves.items()
            if curve_share.mig == share.mig and (reading := curve.at(batch))
        ]
        fraction = self._device.granted_fraction(share)
        below = max((point for point in points if point[0] <= fraction), default=None)
        above = min((point for point in points if point[0] > fraction), default=None)
        if below is None or above is None:
            return None
        weight = math.log(fraction / below[0]) / math.log(above[0] / below[0])
        return math.exp((1 - weight) * math.log(below[1]) + weight * math.log(above[1])), INTERPOLATED

    def _extrapolate_point(self, batch: int, share: Share, shape: Shape | None) -> tuple[float, str]:
        point = self.nearest(batch, share)
        if shape is not None and (nearest_shape := shape(point.batch, point.share)) > 0.0:  # 0: no op has work to count
            factor = shape(batch, share) / nearest_shape
            return point.latency_ms * factor, EXTRAPOLATED
        curve = self.curves[point.share]
        reading = curve.at(batch)
        value = reading[0] if reading else curve.beyond(batch)
        parts = point.granted_fraction(self._device) / self._device.granted_fraction(share)
        return value * max(1.0, parts), EXTRAPOLATED


class LatencyEnvelope:
    """Bounds of a model's time on one device from its measurements there.

    A batch takes no less time with more requests, more processes or fewer compute units, and at most in proportion to
    each of them. The tightest bound over all measured points counts. ``points``: of one model on one device; at least
    one.
    """

    def __init__(self, points: Sequence[Point], device: Device) -> None:
        self._device = device
        self._batches = np.array([point.batch for point in points], dtype=float)
        self._processes = np.array([point.processes for point in points], dtype=float)
        self._parts = np.array([point.granted_fraction(device) for point in points], dtype=float)
        self._latencies = np.array([point.latency_ms for point in points], dtype=float)

    def bounds(self, batch: int, share: Share, processes: int) -> tuple[float, float]:
        """Return the least and the largest time of a batch in ms, without widening.

        Where measurements contradict the assumptions, the least may exceed the largest.
        """
        more = batch / self._batches, self._parts / self._device.granted_fraction(share), processes / self._processes
        least, most = self._latencies, self._latencies
        for ratio in more:
            least, most = least * np.minimum(1.0, ratio), most * np.maximum(1.0, ratio)
        return float(least.max()), float(most.min())

    def interval(self, batch: int, share: Share, processes: int, slack: float | None = None) -> tuple[float, float]:
        """Return the 90% interval of the time of a batch in ms; ``slack``: by default that of published models."""
        slack = constant("published", "extrapolation_slack") if slack is None else slack
        least, most = sorted(self.bounds(batch, share, processes))
        return least / slack, most * slack


class Calibration:
    """Errors of interpolation, extrapolation and predictions on a device, fitted to its measurements.

    ``surfaces``: measurements with one process by model name. ``shape_of``: returns a model's roofline in ms by batch
    size and share, None without a graph; called only to scale a roofline, because it reads the file.
    """

    def __init__(self, surfaces: Mapping[str, Surface], shape_of: Callable[[str], Shape | None]) -> None:
        self._surfaces = surfaces
        self._shape_of = shape_of

    def interpolation_error(self, measured_error: float) -> float:
        """Return the half-width of an interpolated value's 90% interval, as a fraction of the value.

        ``measured_error``: relative error of the measurements.
        """
        return self._between + measured_error

    def scale_prediction(self, least_ms: float, source: str) -> Figure:
        """Return the figure for a roofline of ``least_ms``, scaled by the device's ratio of measurement to roofline.

        From four measured models on, the interval is conformal: each model's ratio is compared with that of the others.
        With fewer models it is the spread of published measurements on two GPUs, and without models their range, which
        guarantees nothing on other kinds of devices.
        """
        if not self.ratios:
            low, high = (constant("published", f"roofline_{end}") for end in ("low", "high"))
            return Figure(least_ms, source, least_ms * low, least_ms * high)
        return self._scale_by_models(least_ms, source, constant("published", "roofline_spread"))

    def scale_figure(self, figure: Figure) -> Figure:
        """Return a prediction learned on other devices, scaled like a roofline by the models measured
        on this device.
        """
        if not self.ratios or figure.value <= 0.0:
            return figure
        return self._scale_by_models(figure.value, figure.source, figure.upper() / figure.value)

    def _scale_by_models(self, predicted_ms: float, source: str, spread: float) -> Figure:
        value = predicted_ms * common_factor(self.ratios)
        if len(self.ratios) >= ENOUGH_MODELS:
            spread = interval_factor(left_out_residuals(self.ratios)) or 1.0
        return Figure(value, source, value / spread, value * spread)

    @cached_property
    def _between(self) -> float:
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.left_out_errors()]
        return _error_of(errors, "interpolation_error")

    def carried_error(self, doublings: float) -> float:
        """Return half of the 90% interval over the value, for figures carried over from other sizes."""
        return self._beyond * max(1.0, doublings)

    @cached_property
    def _beyond(self) -> float:
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.end_errors()]
        return _error_of(errors, "extrapolation_error")

    @cached_property
    def ratios(self) -> dict[str, list[float]]:
        """Ratios of measured to roofline time by model name, without models whose roofline is zero."""
        shapes = {name: self._shape_of(name) for name in self._surfaces}
        ratios = {
            name: [
                point.latency_ms / least
                for point in self._surfaces[name].points.values()
                if (least := shape(point.batch, point.share)) > 0.0
            ]
            for name, shape in shapes.items()
            if shape is not None
        }
        return {name: values for name, values in ratios.items() if values}


def _error_of(errors: Sequence[float], published: str) -> float:
    """Return the quantile of a device's errors, at least 1%; with fewer than five, that of published measurements."""
    error = quantile(errors, LEVEL) if len(errors) >= 5 else None
    return max(0.01, constant("published", published) if error is None else error)
