"""Measurements of a model on a device, over batch sizes and shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED
from gpuprof.domain.share import Share
from gpuprof.estimators.measured.curve import BatchCurve
from gpuprof.estimators.measured.measured import Point, shares_of

#: Least time of an execution in ms by batch and share, up to a factor; scales measured points to other workloads.
Shape = Callable[[int, Share], float]

#: Digits of distances that are equal but for rounding.
_DECIMALS = 9


@dataclass(frozen=True, slots=True)
class Reading:
    """A value of the surface."""

    value: float
    source: str


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
        self._nearest: dict[tuple[int, Share], Point] = {}
        # Among equally near points `nearest` takes the first, so those of larger batches come first.
        self._sorted = sorted(self.points.values(), key=lambda point: -point.batch)
        self._log_batches = np.log2([float(point.batch) for point in self._sorted])
        self._log_fractions = np.log2([point.granted_fraction(device) for point in self._sorted])
        self._migs = np.array([point.share.mig or "" for point in self._sorted])

    def read_latency(self, batch: int, share: Share, shape: Callable[[], Shape | None]) -> Reading:
        """Return the latency: measured, interpolated between measured batches or shares, else carried over.

        ``shape`` is called only in the last case.
        """
        if share in self.curves and (reading := self.curves[share].at(batch)):
            return Reading(*reading)
        between = self._between_shares(batch, share)
        return between or self._extrapolate_point(batch, share, shape())

    def nearest(self, batch: int, share: Share) -> Point:
        """Return the measured point nearest in doublings of batch and share; among equals, that of the larger batch.

        A share of another kind of partition is one doubling further away.
        """
        key = batch, share
        if key not in self._nearest:
            doublings = np.abs(self._log_fractions - math.log2(self._device.granted_fraction(share)))
            doublings += np.abs(self._log_batches - math.log2(batch)) + (self._migs != (share.mig or ""))
            self._nearest[key] = self._sorted[int(np.argmin(np.round(doublings, _DECIMALS)))]
        return self._nearest[key]

    def _between_shares(self, batch: int, share: Share) -> Reading | None:
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
        return Reading(math.exp((1 - weight) * math.log(below[1]) + weight * math.log(above[1])), INTERPOLATED)

    def _extrapolate_point(self, batch: int, share: Share, shape: Shape | None) -> Reading:
        point = self.nearest(batch, share)
        if shape is not None and (nearest_shape := shape(point.batch, point.share)) > 0.0:  # 0: no op has work to count
            factor = shape(batch, share) / nearest_shape
            return Reading(point.latency_ms * factor, EXTRAPOLATED)
        curve = self.curves[point.share]
        reading = curve.at(batch)
        value = reading[0] if reading else curve.beyond(batch)
        parts = point.granted_fraction(self._device) / self._device.granted_fraction(share)
        return Reading(value * max(1.0, parts), EXTRAPOLATED)
