"""Distributions of the time until the n-th arrival, on a lattice, for independent gaps that are not gamma."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr

from gpuprof.domain.arrival_process import HyperexponentialArrivals, LognormalArrivals

Array = NDArray[Any]

#: Arrivals with independent gaps: their backlog follows Lindley's recursion.
Renewal = LognormalArrivals | HyperexponentialArrivals

_FINER = 8  # cells of a single gap per cell of the sum
_LONGEST = 1_200  # cells of the sum: later arrivals find no backlog, however late


def sum_law(process: Renewal, count: int, step: float) -> Array:
    """Return the law of the sum of ``count`` gaps on multiples of ``step``, longer times at the lattice's end.

    ``process``: with its rate in requests per unit of time, not per second.

    Returns
    -------
    ndarray
        Probability of each multiple.
    """
    fine = step / _FINER
    total = _split(process, fine)
    law = np.ones(1)
    while count:  # power of the law, by squaring
        if count % 2:
            law = _add(law, total)
        count //= 2
        if count:
            total = _add(total, total)
    places = np.arange(len(law)) / _FINER
    low = places.astype(np.int64)
    mass = np.bincount(low, law * (1.0 - places % 1.0), _LONGEST + 2)
    mass += np.bincount(low + 1, law * (places % 1.0), _LONGEST + 2)
    return np.asarray(mass[: int(np.flatnonzero(mass)[-1]) + 1] / mass.sum())


def _split(process: Renewal, step: float) -> Array:
    """Return the law of a gap, each time split over its two neighbouring multiples with the mean kept."""
    shortfall = _shortfall(process, np.arange(_LONGEST * _FINER + 2) * step) / step
    mass = np.maximum(np.diff(shortfall, 2, prepend=0.0), 0.0)
    mass[-1] = max(0.0, 1.0 - mass[:-1].sum())  # longer gaps
    return np.asarray(mass)


def _shortfall(process: Renewal, times: Array) -> Array:
    """Return the mean shortfall of a gap against these times, E[max(0, t - gap)]."""
    mean = 1.0 / process.rate_rps
    if isinstance(process, LognormalArrivals):
        variance = math.log1p(process.scv)
        with np.errstate(divide="ignore"):
            score = (np.log(times / mean) + 0.5 * variance) / math.sqrt(variance)
        return np.asarray(times * ndtr(score) - mean * ndtr(score - math.sqrt(variance)))
    short = 0.5 * (1.0 + math.sqrt((process.scv - 1.0) / (process.scv + 1.0)))
    parts = ((part, 2.0 * part * process.rate_rps) for part in (short, 1.0 - short) if part > 0.0)
    return np.asarray(sum(part * (times + np.expm1(-rate * times) / rate) for part, rate in parts))


def _add(first: Array, second: Array) -> Array:
    """Return the law of the sum of two independent times, with the mass beyond the lattice at its end."""
    count, most = len(first) + len(second) - 1, _LONGEST * _FINER + 1
    size = next_fast_len(count, real=True)
    law = np.maximum(irfft(rfft(first, size) * rfft(second, size), size)[:count], 0.0)
    if count > most:
        law = np.append(law[: most - 1], law[most - 1 :].sum())
    return np.asarray(law)
