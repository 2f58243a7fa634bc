"""A replica of several processes, or with arrivals that are not Poisson: simulated, its tail taken from analysis.

Where no analysis of the real queue is known, requests are simulated one by one with fixed random numbers, so that the
result is a function of its arguments and neighbouring arguments give comparable results. A plain simulation would
need millions of requests near capacity, because a backlog stays for thousands of batches. So each request is counted
by the backlog that it would have found had batches always been full (`batch_backlog`), whose law is known exactly
(post-stratification): the simulation only has to tell how long requests take *given* that backlog, which varies little
and is forgotten within a few batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv, gammaincinv, ndtr, ndtri

from gpuprof.estimators.queueing import batch_kernels
from gpuprof.estimators.queueing.batch_backlog import Backlog, backlog_law

Array = NDArray[Any]

_SEED = 20240229
_REQUESTS = 1 << 17  # at least; and
_GROUPS = 24_576  # so many full batches
_SCORES = 1 << 19
_BINS = 1 << 14
_WARM_UP = 100  # groups
_ENOUGH = 10  # groups that a stratum must have been seen in
#: Between the quantiles of the backlog at these probabilities lie the strata.
_STRATA = np.concatenate([np.linspace(0.04, 0.96, 24), 1.0 - np.geomspace(0.03, 1e-4, 12)])


@dataclass(frozen=True, slots=True)
class Queue:
    """A replica that is stable.

    Attributes
    ----------
    rate, scv : float
        Requests per unit of time, and the squared coefficient of variation of the gaps between them.
    max_wait : float
    means : ndarray of shape (B,)
        Mean service time of a batch of 1..B requests.
    cv : float
        Coefficient of variation of a service time (gamma).
    processes : int
    pause, pause_cv : float
        Time of a batch that finds its process at rest over that of one that follows another, and its variation.
    """

    rate: float
    scv: float
    max_wait: float
    means: Array
    cv: float
    processes: int
    pause: float = 1.0
    pause_cv: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen.

    Attributes
    ----------
    times : ndarray
        In the system, at the probabilities asked for.
    mean, mean_batch, mean_service : float
    """

    times: Array
    mean: float
    mean_batch: float
    mean_service: float


@dataclass(frozen=True, slots=True)
class _Strata:
    """Parts of the backlog's law.

    Attributes
    ----------
    step : float
        Width of a cell of the backlog.
    labels : ndarray of int
        Cell → stratum.
    mass, level : ndarray
        Probability of each stratum and its mean backlog.
    """

    step: float
    labels: Array
    mass: Array
    level: Array


def simulate(queue: Queue, probabilities: Array) -> Sample:
    """Simulate ``queue`` and return its quantiles at ``probabilities``."""
    batch = len(queue.means)
    mean = float(queue.means[-1]) / queue.processes
    law = backlog_law(queue.rate, queue.scv, batch, mean, queue.cv)
    parts = _strata(law)
    groups = max(_GROUPS, _REQUESTS // batch)
    gap_scores, scores, others, even = _scores()
    served = _quantiles(queue.cv**2)
    arrived, spent = batch_kernels.empty(groups * batch), batch_kernels.empty(groups * batch)
    batch_kernels.arrivals(1.0 / queue.rate, _quantiles(queue.scv), gap_scores, arrived)
    strata = np.empty(groups, np.int64)
    batch_kernels.strata(batch, mean, served, scores, arrived, parts.step, parts.labels, strata)
    laws = (served, queue.pause * (served if queue.pause_cv == queue.cv else _quantiles(queue.pause_cv**2)))
    done, batches, busy = batch_kernels.queue(
        arrived, queue.means, queue.max_wait, np.zeros(queue.processes), laws, scores, others, even, spent
    )
    seen = slice(_WARM_UP, done // batch)
    times, mean_time = _weighted(spent[_WARM_UP * batch : seen.stop * batch], batch, strata[seen], parts)
    quantiles = _beyond(times, probabilities, law)
    return Sample(quantiles, mean_time, done / batches, busy / batches)


@dataclass(frozen=True, slots=True)
class _Times:
    """Cumulative distribution of the times, and the probability of backlogs that hardly were seen."""

    edges: Array
    below: Array
    unseen: float


def _weighted(spent: Array, batch: int, strata: Array, parts: _Strata) -> tuple[_Times, float]:
    """Return the law of the times, each stratum weighted by its exact probability, and its mean."""
    counts = np.bincount(strata, minlength=len(parts.mass)).astype(np.float64)
    merged, top = _merged(counts)
    seen = np.bincount(merged, counts, top + 1)
    mass = np.bincount(merged, parts.mass, top + 1)
    beyond = np.arange(len(counts)) > top
    unseen = float(parts.mass[beyond].sum())
    weights = (mass / np.maximum(seen, 1.0))[merged]
    low, high = float(spent.min()), float(spent.max())
    scale = _BINS / max(high - low, 1e-9 * high)
    histogram, sums = np.zeros(_BINS), np.zeros(len(counts))
    batch_kernels.histogram(spent, batch, strata, weights, low, scale, histogram, sums)
    means = np.bincount(merged, sums, top + 1) / np.maximum(seen, 1.0) / batch
    # A higher backlog than was seen takes longer by as much as it is higher.
    longer = float(parts.mass[beyond] @ (parts.level[beyond] - parts.level[top]))
    below = np.cumsum(histogram) / histogram.sum()
    edges = low + np.arange(_BINS + 1) / scale
    return _Times(edges, np.append(0.0, below), unseen), float(mass @ means) + longer


def _merged(counts: Array) -> tuple[Array, int]:
    """Return for each stratum the one that it is counted with, and the last that was seen often enough.

    Strata that were seldom seen join the next lower one that was, the lowest the next higher.
    """
    often = np.flatnonzero(counts >= _ENOUGH)
    lowest, top = (int(often[0]), int(often[-1])) if len(often) else (0, 0)
    labels = np.maximum.accumulate(np.where(counts >= _ENOUGH, np.arange(len(counts)), lowest))
    return np.minimum(labels, top), top


def _beyond(times: _Times, probabilities: Array, law: Backlog | None) -> Array:
    """Return the quantiles, those in the unseen tail at least as far above the last seen as the backlog's are."""
    found = np.interp(probabilities, times.below, times.edges)
    if law is None or times.unseen <= 0.0:
        return found
    last = np.array([1.0 - min(3.0 * times.unseen, 0.5)])
    further = float(np.interp(last, times.below, times.edges)[0]) + law.quantile(probabilities) - law.quantile(last)
    return np.where(probabilities > last, np.maximum(found, further), found)


def _strata(law: Backlog | None) -> _Strata:
    if law is None:
        return _Strata(1.0, np.zeros(1, np.int64), np.ones(1), np.zeros(1))
    upto = np.cumsum(law.mass)
    labels = 1 + np.searchsorted(_STRATA, upto - 0.5 * law.mass)
    labels[0] = 0
    labels = np.unique(labels, return_inverse=True)[1]
    mass = np.bincount(labels, law.mass)
    level = np.bincount(labels, law.mass * np.arange(len(labels)) * law.step) / np.maximum(mass, 1e-300)
    return _Strata(law.step, labels, mass, level)


def _quantiles(scv: float) -> Array:
    """Return the quantiles of a gamma law of mean 1 at the standard normal scores of `batch_kernels`."""
    scores = np.linspace(-batch_kernels.SCORE_REACH, batch_kernels.SCORE_REACH, batch_kernels.ENTRIES)
    if scv < 1e-8:
        return np.ones(len(scores))
    half = len(scores) // 2
    low, high = gammaincinv(1.0 / scv, ndtr(scores[:half])), gammainccinv(1.0 / scv, ndtr(-scores[half:]))
    return np.asarray(scv * np.concatenate([low, high]), dtype=np.float64)


@cache
def _scores() -> tuple[Array, Array, Array, Array]:
    """Return standard normal numbers for gaps, for the batches of each group and for batches more in a group.

    Last come evenly spread ones: multiples of the golden section, of which any stretch is nearly uniform.
    """
    random = np.random.default_rng(_SEED)
    gaps, groups, more = (random.standard_normal(size, np.float32) for size in (_SCORES, _SCORES, _SCORES // 4))
    even = ndtri((np.arange(1, _SCORES + 1) * 0.6180339887498949) % 1.0).astype(np.float32)
    return gaps, groups, more, even
