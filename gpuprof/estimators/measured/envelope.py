"""Bounds of times beyond the measurements that hold for most models, widened by their observed violations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.constants import constant
from gpuprof.estimators.measured.measured import Point


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
