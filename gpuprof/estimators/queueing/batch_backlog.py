"""Backlog of a replica with full batches only: the part of its queue that decides the tail.

The k-th group of B requests waits ``W_k = max(0, W_{k-1} + S_{k-1} / c - T_k)``: S a full batch's service time, c the
processes, T the time between the last requests of two groups (Lindley's recursion). The recursion is exact for full
batches and one process; elsewhere W serves as a control for the real queue. Its law is solved on a lattice, closed by
its exponential tail (the root of the Cramér-Lundberg equation), for gamma service times and gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammainc, gammaincinv

Array = NDArray[Any]

#: Cells of the lattice for W; the tail beyond is geometric.
_CELLS = 192
#: Cells per standard deviation of ``S / c - T``, or per batch time where shorter.
_CELLS_PER_SCALE = 10
#: Lattice lengths beyond the lattice, whose flow back is included.
_BEYOND = 3
#: Probability beyond which the geometric tail is cut, and maximum number of cells of any law.
_TAIL_MASS, _MOST_CELLS = 1e-9, 40_000
#: Squared variation below which a time counts as constant: the gamma's transform loses its digits there.
_SMALL = 1e-8


def limit_threads() -> Any:
    """Return a context in which linear algebra uses one thread: waking more costs more than such small matrices."""
    return _blas_threads().limit(limits=1, user_api="blas")


@cache
def _blas_threads() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


@dataclass(frozen=True, slots=True)
class Backlog:
    """Law of W."""

    step: float  #: Width of a cell. Cell 0 ends at half a step and holds W = 0 too; cell j is around ``j step``.
    mass: Array  #: Probability of each cell.

    def quantile(self, probability: Array) -> Array:
        """Return the quantiles of W."""
        edges = (np.arange(len(self.mass)) + 0.5) * self.step
        return np.asarray(np.interp(probability, np.cumsum(self.mass), edges, left=0.0))


def backlog_law(rate: float, scv: float, batch: int, mean: float, cv: float) -> Backlog | None:
    """Return the law of W; None where nothing varies and W is always 0.

    ``rate``, ``scv``: requests per unit of time and the squared coefficient of variation of their gaps; below capacity;
    ``mean``, ``cv``: of a full batch's service time, divided by the processes.
    """
    spread = math.sqrt((cv * mean) ** 2 + scv * batch / rate**2)
    if spread < 1e-6 * mean:
        return None
    step = min(spread, mean) / _CELLS_PER_SCALE
    served = lattice_law(mean, cv**2, step)
    arriving = lattice_law(batch / rate, scv / batch, step)
    change = convolve(served, arriving[::-1])
    ratio = math.exp(-decay_rate(rate, scv, batch, mean, cv) * step)
    beyond = _BEYOND * _CELLS
    kernel = toeplitz(np.maximum(change, 0.0), _CELLS - 1, _CELLS + beyond, len(arriving))
    inside = with_tail(kernel[:, 1:_CELLS].copy(), kernel[:, _CELLS:], ratio)
    positive = np.maximum(np.linalg.solve(np.eye(_CELLS - 1) - inside, kernel[:, 0]), 0.0)
    mass = append_tail(np.append(1.0, positive), ratio)
    return Backlog(step, mass / mass.sum())


def append_tail(mass: Array, ratio: float) -> Array:
    """Return the probabilities of the cells followed by their geometric tail, cut where it is negligible."""
    more = 0
    if mass[-1] > _TAIL_MASS and ratio < 1.0:
        more = min(_MOST_CELLS, math.ceil(math.log(_TAIL_MASS / mass[-1]) / math.log(ratio)))
    return np.append(mass, mass[-1] * ratio ** np.arange(1, more + 1))


def decay_rate(rate: float, scv: float, batch: int, mean: float, cv: float) -> float:
    """Return the decay rate of the law of W: the positive x with E[exp(x S / c)] E[exp(-x T)] = 1."""

    def excess(x: float) -> float:
        served = x * mean if cv**2 < _SMALL else -math.log1p(-x * mean * cv**2) / cv**2
        arriving = x * batch / rate if scv < _SMALL else batch / scv * math.log1p(x * scv / rate)
        return served - arriving

    # The gamma's transform is finite only up to this limit.
    limit = 1e6 / mean if cv**2 < _SMALL else (1.0 - 1e-12) / (mean * cv**2)
    return _root(excess, 1e-9 / mean, limit)


def lattice_law(mean: float, scv: float, step: float) -> Array:
    """Return a gamma law on multiples of ``step`` with its mean kept: a constant is split over two cells."""
    if scv < _SMALL:
        place = min(mean / step, float(_MOST_CELLS))
        split = np.zeros(int(place) + 2)
        split[int(place)], split[int(place) + 1] = 1.0 - place % 1.0, place % 1.0
        return split
    shape = 1.0 / scv
    last = min(int(max(1.0, gammaincinv(shape, 1.0 - 1e-9) / shape) * mean / step) + 2, _MOST_CELLS)
    points = np.arange(last + 1) * step / mean
    # Linear splitting of the mass: the second difference of the integrated distribution.
    integral = points * gammainc(shape, points * shape) - gammainc(shape + 1.0, points * shape)
    integral = np.concatenate([[0.0], integral, [integral[-1] + step / mean]])
    mass = np.maximum(np.diff(integral, 2), 0.0)
    return np.asarray(mass / mass.sum(), dtype=np.float64)


def convolve(first: Array, second: Array) -> Array:
    """Return the convolution of two real sequences by Fourier transforms; SciPy's own takes long to import."""
    count = len(first) + len(second) - 1
    size = next_fast_len(count, real=True)
    return np.asarray(irfft(rfft(first, size) * rfft(second, size), size)[:count])


def toeplitz(values: Array, rows: int, columns: int, offset: int) -> Array:
    """Return the matrix M[i, j] = values[i - j + offset], 0 outside, read-only."""
    before, after = max(0, columns - 1 - offset), max(0, rows + offset - len(values))
    padded = np.concatenate([np.zeros(before), values, np.zeros(after)])[::-1]
    # Row i is a window of the reversed values, starting a place before that of row i - 1.
    start = len(padded) - 1 - offset - before
    windows = np.lib.stride_tricks.sliding_window_view(padded, columns)
    return windows[start - rows + 1 : start + 1][::-1]


def with_tail(matrix: Array, beyond: Array, ratio: float) -> Array:
    """Fold the columns beyond the lattice, geometric in ``ratio``, into the last column."""
    powers = ratio ** np.arange(1, beyond.shape[1] + 1)
    matrix[:, -1] += beyond @ powers
    return matrix


def _root(function: Callable[[float], float], start: float, limit: float) -> float:
    """Return the root of an initially negative convex function, by doubling and halving; at most ``limit``."""
    low = high = start
    while high < limit and function(high) < 0.0:
        low, high = high, min(2.0 * high, limit)
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)
