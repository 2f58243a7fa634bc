"""A replica of several processes, or with arrivals that are not Poisson: many independent copies simulated at once.

Each step dispatches one batch in every copy, by the rule of `gpuprof.batching`. The random numbers are the same in
every call, so that the result is a function of its arguments and neighbouring arguments give comparable results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators import batch_chain

Array = NDArray[Any]

_LANES = 512
_POOL = 48
_SEED = 20240229
_MIN_REQUESTS = 120_000


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen: times in the system, batch sizes' mean, and the mean busy time of a batch.

    Attributes
    ----------
    times : ndarray of shape (requests,)
        Sorted.
    mean_batch, mean_service : float
    """

    times: Array
    mean_batch: float
    mean_service: float


def simulate(
    rate: float,
    scv: float,
    max_wait: float,
    means: Array,
    cv: float,
    processes: int,
    load: float,
    pause: float = 1.0,
) -> Sample:
    """Simulate a replica that is stable.

    Parameters
    ----------
    rate, scv : float
        Requests per unit of time, and the squared coefficient of variation of the gaps between them.
    max_wait : float
    means : ndarray of shape (B,)
        Mean service time of a batch of 1..B requests.
    cv : float
        Coefficient of variation of a service time (gamma).
    processes : int
    load : float
        Fraction of the capacity that is asked for, below 1; decides how long the warm-up lasts.
    pause : float
        Time of a batch that finds its process at rest over that of one that follows another.
    """
    batch = len(means)
    gaps, factors = _gap_pool(batch, scv), _factor_pool(cv)
    window = gaps[0] / rate
    free = _start(rate, scv, max_wait, means, cv, processes, load)
    rows, order = np.arange(_LANES), np.arange(batch)
    warm, steps = _length(load, batch, processes)
    times: list[Array] = []
    taken = served = 0.0
    for step in range(warm + steps):
        first_free = free.argmin(axis=1)
        released = free[rows, first_free]
        dispatch = np.maximum(released, np.minimum(window[:, 0] + max_wait, window[:, -1]))
        size = (window <= dispatch[:, None]).sum(axis=1)
        service = means[size - 1] * np.roll(factors[step % _POOL], step)
        service[dispatch > released] *= pause
        done = dispatch + service
        free[rows, first_free] = done
        if step >= warm:
            spent = done[:, None] - window
            times.append(spent[order < size[:, None]])
            taken += size.sum()
            served += service.sum()
        window = _advance(window, size, np.roll(gaps[(step + 1) % _POOL], 7 * step, axis=0) / rate, rows, order)
    return Sample(np.sort(np.concatenate(times)), taken / (steps * _LANES), served / (steps * _LANES))


def _start(rate: float, scv: float, max_wait: float, means: Array, cv: float, processes: int, load: float) -> Array:
    """Return when the processes of each lane come free.

    The backlog of several processes is nearly that of one as fast as all, which is solved: its quantiles, one a
    lane, leave little to warm up and little to chance. That all are busy is less likely by Erlang's C over the load.
    """
    random = np.random.default_rng(_SEED + 2)
    # Constant services keep the phases that processes start with for long: start them at random ones.
    phases = (
        random.permuted(np.tile(np.arange(processes), (_LANES, 1)), axis=1) + random.random((_LANES, 1))
    ) / processes
    law = batch_chain.solve(rate, max_wait, batch_chain.service_of(means / processes, cv))
    mass = law.backlog_mass * erlang_c(processes, load) / load
    upto = np.append(1.0 - mass.sum(), 1.0 - mass.sum() + np.cumsum(mass))
    ranks = (np.arange(_LANES) + 0.5) / _LANES
    backlog = np.interp(ranks, upto, np.append(0.0, law.backlog_z))
    busy = (backlog[:, None] > 0.0) | (random.random((_LANES, processes)) < load)
    usual = float(law.fresh @ np.tile(means, 2)) + float(law.backlog_mass.sum() * means[-1])
    service = np.where(backlog > 0.0, means[-1], usual)[:, None]
    return np.asarray(np.where(busy, backlog[:, None] + service * phases, 0.0))


def erlang_c(processes: int, load: float) -> float:
    """Return the probability that all of some M/M/c servers are busy."""
    offered = load * processes
    blocked = 1.0
    for n in range(1, processes + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))


def _advance(window: Array, size: Array, more: Array, rows: Array, order: Array) -> Array:
    """Drop the ``size`` oldest arrivals of each lane and append as many."""
    longer = np.concatenate([window, window[:, -1:] + more], axis=1)
    return np.asarray(longer[rows[:, None], order + size[:, None]], dtype=np.float64)


def _length(load: float, batch: int, processes: int) -> tuple[int, int]:
    """Return how many batches to throw away and how many to keep in each lane."""
    relaxation = min(1.0 / max(1.0 - load, 0.02) ** 2 / math.sqrt(batch), 400.0)
    warm = int(20 + 10 * processes + 0.7 * relaxation)
    return warm, max(24, int(relaxation), math.ceil(_MIN_REQUESTS / (_LANES * max(1.0, load * batch))))


@lru_cache(maxsize=16)
def _gap_pool(batch: int, scv: float) -> Array:
    random = np.random.default_rng(_SEED)
    size = (_POOL, _LANES, batch)
    gaps = random.gamma(1.0 / scv, scv, size) if scv > 1e-6 else np.ones(size)
    # Exactly the mean that was asked for: near capacity, waiting is very sensitive to it.
    return np.asarray(np.cumsum(gaps / gaps.mean(), axis=2), dtype=np.float64)


@lru_cache(maxsize=16)
def _factor_pool(cv: float) -> Array:
    random = np.random.default_rng(_SEED + 1)
    size = (_POOL, _LANES)
    factors = random.gamma(cv**-2.0, cv**2.0, size) if cv > 1e-3 else np.ones(size)
    return np.asarray(factors / factors.mean(), dtype=np.float64)
