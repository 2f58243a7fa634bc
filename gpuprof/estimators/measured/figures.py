"""Figures made from measured points: with the interval of an error, blended, or of another column than the latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
from gpuprof.estimators.measured.curve import BatchCurve
from gpuprof.estimators.measured.measured import MeasuredModel
from gpuprof.estimators.measured.size_selection import blend_measured


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
