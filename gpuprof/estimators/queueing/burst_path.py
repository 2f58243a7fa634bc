"""Bursts and calm one after another, drawn so that a short path of them is representative of all.

What a request finds depends on how long its burst has lasted, and few bursts fit into a simulation. So the lengths are
drawn evenly from their law, and each request is counted by its phase and by the backlog of a fluid that flows in at the
phase's rate and out at the pool's capacity. The law of both is known exactly (D. Anick, D. Mitra and M. M. Sondhi,
"Stochastic theory of a data-handling system with multiple sources", 1982, for one source that is on and off).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S, Bursts
from gpuprof.estimators.queueing.batch_backlog import Backlog

Array = NDArray[Any]

_LEAST_CYCLES = 60
_STEPS = 20  # of the lattice, in a mean backlog
_LEAST_MASS = 1e-7
#: Between these parts of the backlogs above 0 lie the strata.
_LEVELS = np.concatenate([np.linspace(0.1, 0.9, 9), 1.0 - np.geomspace(0.06, 1e-4, 10)])


@dataclass(frozen=True, slots=True)
class BurstPath:
    """A path through calm and bursts, in the pool's unit of time.

    Attributes
    ----------
    ends : ndarray of shape (2 cycles + 1,)
        When each phase begins, first a calm one, and when the last ends.
    expected : ndarray of shape (2 cycles + 1,)
        Requests that have come by then, on average.
    backlog : ndarray of shape (2 cycles + 1,)
        Of the fluid, as the time in which the pool works it off.
    rise, fall : float
        How fast the backlog grows in a burst, where it does, and falls in the calm.
    burst_part : float
        Of the requests.
    kept_part, decay : float
        Part of the requests of the calm that find a backlog, and the rate at which the law of a backlog falls.
    shortening : float
        How much longer bursts and calm are than on the path.
    """

    ends: Array
    expected: Array
    backlog: Array
    rise: float
    fall: float
    burst_part: float
    kept_part: float
    decay: float
    shortening: float

    def draw_arrivals(self, requests: int, random: np.random.Generator) -> Array:
        """Return so many times of requests."""
        events = np.cumsum(random.standard_exponential(requests))
        return np.asarray(np.interp(events * (self.expected[-1] / events[-1]), self.expected, self.ends))

    def backlog_at(self, times: Array) -> Array:
        """Return the fluid's backlog at these times."""
        phase, within = self._locate(times)
        slope = np.where(phase % 2 == 1, self.rise, -self.fall)
        return np.asarray(np.maximum(0.0, self.backlog[phase] + slope * within))

    def stratum_at(self, times: Array) -> Array:
        """Return the strata of these times: calm without a backlog, then by backlog, calm and burst in turn."""
        burst = self._locate(times)[0] % 2
        if self.rise <= 0.0:
            return np.asarray(burst)
        backlog = self.backlog_at(times)
        level = np.searchsorted(self._level_edges(), backlog, side="right")
        return np.asarray(np.where((burst == 0) & (backlog <= 0.0), 0, 1 + 2 * level + burst))

    def masses(self) -> Array:
        """Return the part of all requests in each stratum."""
        calm = 1.0 - self.burst_part
        if self.rise <= 0.0:
            return np.array([calm, self.burst_part])
        parts = np.diff(np.concatenate([[0.0], _LEVELS, [1.0]]))
        pairs = np.outer(parts, [calm * self.kept_part, self.burst_part]).ravel()
        return np.concatenate([[calm * (1.0 - self.kept_part)], pairs])

    def levels(self) -> Array:
        """Return a backlog for each stratum, as long as it really is."""
        if self.rise <= 0.0:
            return np.zeros(2)
        edges = np.concatenate([[0.0], self._level_edges()])
        middles = edges + np.append(0.5 * np.diff(edges), 1.0 / self.decay)
        return np.concatenate([[0.0], np.repeat(self.shortening * middles, 2)])

    def law(self) -> Backlog | None:
        """Return the law of the backlog over all requests, as long as it really is; None where there is none."""
        if self.rise <= 0.0:
            return None
        above = self.burst_part + (1.0 - self.burst_part) * self.kept_part
        step = self.shortening / (self.decay * _STEPS)
        cells = math.ceil(_STEPS * math.log(above / _LEAST_MASS))
        beyond = above * np.exp(-(np.arange(cells) + 0.5) / _STEPS)
        return Backlog(step, -np.diff(np.concatenate([[1.0], beyond, [0.0]])))

    def _locate(self, times: Array) -> tuple[Array, Array]:
        phase = np.clip(np.searchsorted(self.ends, times, side="right") - 1, 0, len(self.ends) - 2)
        return phase, times - self.ends[phase]

    def _level_edges(self) -> Array:
        return np.asarray(-np.log1p(-_LEVELS) / self.decay)


def draw_path(
    process: Bursts, rate: float, unit_ms: float, capacity: float, requests: int, random: np.random.Generator
) -> BurstPath:
    """Return a path on which about so many requests come.

    Parameters
    ----------
    process : Bursts
    rate, capacity : float
        Requests in a unit of time: that come, and that the pool answers when every batch is full.
    unit_ms : float
    requests : int
        Where they would come in too few cycles, these are shortened; the backlog grows in proportion to their length.
    """
    burst, calm = (seconds * NS_PER_S * 1e-6 / unit_ms for seconds in (process.burst_s, process.calm_s))
    cycles = requests / rate / (burst + calm)
    shortening = max(1.0, _LEAST_CYCLES / cycles)
    burst, calm = burst / shortening, calm / shortening
    count = max(_LEAST_CYCLES, round(cycles))
    calm_rate = rate * (burst + calm) / (process.ratio * burst + calm)
    even = -np.log1p(-(np.arange(count) + 0.5) / count)
    stays = np.empty(2 * count)
    stays[::2], stays[1::2] = (mean / even.mean() * random.permutation(even) for mean in (calm, burst))
    rates = np.tile([calm_rate, process.ratio * calm_rate], count)
    slopes = rates / capacity - 1.0
    walk = np.concatenate([[0.0], np.cumsum(stays * slopes)])
    rise, fall = max(0.0, float(slopes[1])), -float(slopes[0])
    return BurstPath(
        np.concatenate([[0.0], np.cumsum(stays)]),
        np.concatenate([[0.0], np.cumsum(stays * rates)]),
        walk - np.minimum.accumulate(walk),
        rise,
        fall,
        process.ratio * burst / (process.ratio * burst + calm),
        burst * rise / (calm * fall),
        1.0 / (burst * rise) - 1.0 / (calm * fall) if rise > 0.0 else math.inf,
        shortening,
    )
