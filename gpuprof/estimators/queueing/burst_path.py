"""A short path of alternating bursts and calm, drawn so that it represents all.

A request's sojourn depends on the age of its burst and on the history, and few bursts fit into a simulation. So the
lengths are drawn evenly from their law, and each request is stratified by its phase and by the backlog of a single
server with all replicas' capacity, whose law `burst_backlog` gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S, MmppArrivals
from gpuprof.estimators.queueing.batch_backlog import Backlog
from gpuprof.estimators.queueing.burst_backlog import BurstBacklog

Array = NDArray[Any]

_LEAST_CYCLES = 32  # with shorter bursts, phases change too often: a pool needs a while to adapt to each
_STEPS = 20  # cells of the lattice per scale of the backlog's decay
_LEAST_MASS = 1e-7
_GRAIN = 3.0  # requests' work; below, the law has steps, and waits are short
_TABLED = 1_000
#: Quantiles of the backlog, above the least, between which the strata lie.
_LEVELS = np.concatenate([np.linspace(0.1, 0.9, 9), 1.0 - np.geomspace(0.06, 1e-4, 10)])


@dataclass(frozen=True, slots=True)
class BurstPath:
    """A path through calm and bursts, in the pool's unit of time."""

    ends: Array  #: Shape (2 cycles + 1,). Starts of the phases, beginning with the calm, and the end of the last.
    expected: Array  #: Shape (2 cycles + 1,). Mean number of requests by then.
    #: ``backlog``, ``real``: Laws on the path, and with bursts and calm of real length.
    backlog: BurstBacklog
    real: BurstBacklog
    least: float  #: Lower backlogs form a single stratum.
    shortening: float  #: Ratio of the real lengths of bursts and calm to those on the path.

    def draw_arrivals(self, requests: int, random: np.random.Generator) -> Array:
        """Return the times of ``requests`` requests."""
        events = np.cumsum(random.standard_exponential(requests))
        return np.asarray(np.interp(events * (self.expected[-1] / events[-1]), self.expected, self.ends))

    def phase_at(self, times: Array) -> Array:
        """Return 0 for each time in the calm and 1 in a burst."""
        phase = np.clip(np.searchsorted(self.ends, times, side="right") - 1, 0, len(self.ends) - 2)
        return np.asarray(phase % 2)

    def strata(self, times: Array, backlogs: Array) -> Array:
        """Return the strata of these times and their backlogs: by backlog, calm and burst alternating."""
        return np.asarray(2 * np.searchsorted(self._edges(), backlogs, side="right") + self.phase_at(times))

    def masses(self) -> Array:
        """Return the part of all requests in each stratum."""
        above = self.backlog.beyond_exactly(self._edges())
        between = -np.diff(np.hstack([np.ones((2, 1)), above, np.zeros((2, 1))]), axis=1)
        return np.asarray((self.backlog.parts[:, None] * np.maximum(between, 0.0)).T.ravel())

    def levels(self) -> Array:
        """Return a backlog for each stratum, at the real length of bursts."""
        edges = np.concatenate([[0.0], self._edges()])
        edges = np.array([self.lengthen(edges, phase) for phase in (0, 1)])
        beyond = np.full((2, 1), 1.0 / float(self.real.decays.min()))
        return np.asarray((edges + np.hstack([0.5 * np.diff(edges, axis=1), beyond])).T.ravel())

    def law(self) -> Backlog:
        """Return the law of the backlog over all requests, at the real length of bursts."""
        decay = float(self.real.decays.min())
        step = 1.0 / (decay * _STEPS)
        cells = math.ceil(_STEPS * math.log(1.0 / _LEAST_MASS))
        beyond = self.real.parts @ self.real.beyond((np.arange(cells) + 0.5) * step)
        return Backlog(step, -np.diff(np.concatenate([[1.0], beyond, [0.0]])))

    def lengthen(self, backlogs: Array, phase: int) -> Array:
        """Return the backlogs with equal exceedance probabilities in a phase where bursts have their real length."""
        if self.shortening <= 1.0:
            return backlogs
        here, there = _table(self.backlog), _table(self.real)
        logs = [
            np.log(np.maximum(law.beyond(at)[phase], 1e-12)) for law, at in ((self.backlog, here), (self.real, there))
        ]
        # `np.interp` needs non-decreasing points, and the inverted law fluctuates in its last digits.
        rising = np.interp(-logs[0], np.maximum.accumulate(-logs[1]), there)
        return np.asarray(np.maximum(backlogs, np.interp(backlogs, here, rising)))

    def later(self, times: Array, backlogs: Array, busy: float) -> Array | float:
        """Return the additional times of these requests, where a backlog below ``busy`` causes no wait."""
        if self.shortening <= 1.0:
            return 0.0
        phases, grown = self.phase_at(times), np.empty(len(times))
        for phase in (0, 1):
            here = phases == phase
            grown[here] = self.lengthen(backlogs[here], phase)
        return np.asarray(np.maximum(grown, busy) - np.maximum(backlogs, busy))

    def _edges(self) -> Array:
        at = _table(self.backlog)
        at = np.concatenate([[self.least], at[at > self.least], [at[-1] + self.least]])
        above = self.backlog.parts @ self.backlog.beyond(at)
        below = 1.0 - np.minimum.accumulate(above) / max(float(above[0]), 1e-300)
        return np.concatenate([[self.least], np.interp(_LEVELS, below, at)])


def draw_path(
    process: MmppArrivals,
    rate: float,
    unit_ms: float,
    capacity: float,
    requests: int,
    random: np.random.Generator,
    service_scv: float = 0.0,
) -> BurstPath:
    """Return a path with about ``requests`` requests.

    ``rate`` and ``capacity``: requests per unit of time that arrive, and that the pool answers with full batches;
    ``requests``: where these would span too few cycles, the cycles are shortened, and backlogs are lengthened
    afterwards; ``service_scv``: squared coefficient of variation of a request's work.
    """
    burst, calm = (seconds * NS_PER_S * 1e-6 / unit_ms for seconds in (process.burst_s, process.calm_s))
    cycles = requests / rate / (burst + calm)
    shortening = max(1.0, _LEAST_CYCLES / cycles)
    count = max(_LEAST_CYCLES, round(cycles))
    calm_rate = rate * (burst + calm) / (process.ratio * burst + calm)
    intensities = (calm_rate, process.ratio * calm_rate)
    real = BurstBacklog((calm, burst), intensities, 1.0 / capacity, service_scv)
    burst, calm = burst / shortening, calm / shortening
    # Quantiles of the exponential law in place of draws, scaled to its mean, which midpoints of the parts miss.
    even = -np.log1p(-(np.arange(count) + 0.5) / count)
    stays = np.empty(2 * count)
    stays[::2], stays[1::2] = (mean / even.mean() * random.permutation(even) for mean in (calm, burst))
    return BurstPath(
        np.concatenate([[0.0], np.cumsum(stays)]),
        np.concatenate([[0.0], np.cumsum(stays * np.tile(intensities, count))]),
        BurstBacklog((calm, burst), intensities, 1.0 / capacity, service_scv),
        real,
        _GRAIN * (1.0 + service_scv) / capacity,
        shortening,
    )


def _table(law: BurstBacklog) -> Array:
    """Return backlogs from 0 to the highest of relevant probability."""
    highest = math.log(1.0 / _LEAST_MASS) / float(law.decays.min())
    return np.union1d(
        np.linspace(0.0, highest, _TABLED), np.geomspace(1e-3 / float(law.decays.max()), highest, _TABLED)
    )
