"""Queues on a lattice: the backlog of full batches, and one process that serves Poisson requests in batches.

**Backlog.** The k-th group of B requests waits ``W_k = max(0, W_{k-1} + S_{k-1} / c - T_k)``: S a full batch's service
time, c the processes, T the time between the last requests of two groups (Lindley's recursion). The recursion is exact
for full batches and one process; elsewhere W serves as a control for the real queue. Its law is solved on a lattice,
closed by its exponential tail (the root of the Cramér-Lundberg equation), for gamma service times and gaps.

**One process.** The batching rule of `gpuprof.rules.batching` without a batching delay makes the chain tractable. Let R
be the arrival of the last request of a full batch, or the dispatch of a batch that was not full. Arrivals after R are
independent of the past, so ``y``, the time from R until the process is free again, is a Markov chain from batch to
batch:

- the next batch is full and dispatched when the process comes free, at ``y``: then ``y' = z + S``, with
  ``z = y - t`` and t the arrival of the batch's last request after R, an Erlang variable;
- or the batch is dispatched by the process coming free with n < B requests, or by an arrival on an idle process: then
  ``y' = S`` of n requests or of one, and z is 0.

The chain is solved on a lattice for z > 0 with the same tail; the states z = 0 are kept apart for each batch size and
evaluated off the lattice.
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
from scipy.special import gammainc, gammaincc, gammaincinv, gammaln, ndtr, xlogy

from gpuprof.estimators.queueing.scaling import LATTICE_SERVICES

Array = NDArray[Any]

#: Cells of the lattice for W; the tail beyond is geometric.
_CELLS = 192
#: Cells per standard deviation of ``S / c - T``, or per batch time where shorter.
_CELLS_PER_SCALE = 10
#: Lattice lengths beyond the lattice, whose flow back is included.
_BEYOND = 3
#: Negligible probability, beyond which tails are cut, and maximum number of cells of any law.
TAIL_MASS, _MOST_CELLS = 1e-9, 40_000
#: Squared variation below which a time counts as constant: the gamma's transform loses its digits there.
_SMALL = 1e-8
#: Cells of the chain's lattice per full batch's time.
_CELLS_PER_SERVICE = 32


def limit_threads() -> Any:
    """Return a context in which linear algebra uses one thread: waking more costs more than such small matrices."""
    return _blas_threads().limit(limits=1, user_api="blas")


@cache
def _blas_threads() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


@dataclass(frozen=True, slots=True)
class Backlog:
    """Distribution of the backlog W."""

    step: float  #: Width of a cell. Cell 0 ends at half a step and holds W = 0 too; cell j is around ``j step``.
    mass: Array  #: Probability of each cell.

    def quantile(self, probability: Array) -> Array:
        """Return the quantiles of W."""
        edges = (np.arange(len(self.mass)) + 0.5) * self.step
        return np.asarray(np.interp(probability, np.cumsum(self.mass), edges, left=0.0))


def backlog_law(rate: float, scv: float, batch: int, mean: float, cv: float) -> Backlog | None:
    """Return the distribution of W; None where nothing varies and W is always 0.

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
    if mass[-1] > TAIL_MASS and ratio < 1.0:
        more = min(_MOST_CELLS, math.ceil(math.log(TAIL_MASS / mass[-1]) / math.log(ratio)))
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
    """Return a gamma distribution on multiples of ``step`` with the same mean; a constant is split over two cells."""
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


@dataclass(frozen=True, slots=True)
class Service:
    """Service times of a batch of 1..B requests: means, and the common shape of their distribution."""

    means: Array  #: Shape (B,). In any unit of time.
    #: ``edges``, ``weights``, ``nodes``: Shape (Q + 1,), (Q,), (Q,). The distribution divided by its mean (a gamma of
    #: the given coefficient of variation): edges of Q intervals, their probabilities and their conditional means. A
    #: constant has one node and no width.
    edges: Array
    weights: Array
    nodes: Array
    cv: float
    #: Shape (B,). Means of the states without backlog: of 1..B - 1 requests directly after another batch, then of a
    #: request on an idle process, which may take longer.
    fresh_means: Array


def service_of(means: Array, cv: float, pause: float = 1.0) -> Service:
    """Return the service times with these means and this coefficient of variation.

    ``pause``: ratio of a batch's time on an idle process to its time directly after another batch.
    """
    fresh = np.append(means[:-1], pause * means[0])
    if cv < 1e-3:
        return Service(means, np.ones(2), np.ones(1), np.ones(1), 0.0, fresh)
    shape = 1.0 / cv**2
    # Intervals of 0.4 standard deviations of a normal variable, narrow in the tail.
    probabilities = np.append(0.0, ndtr(np.arange(-2.0, 3.8, 0.4)))
    edges = np.append(gammaincinv(shape, probabilities) / shape, 0.0)
    edges[-1] = gammaincinv(shape, 1.0 - 1e-6) / shape
    weights = np.diff(np.append(probabilities, 1.0))
    # The conditional mean of a gamma follows from the gamma distribution with its shape increased by 1.
    above = gammaincc(shape + 1.0, edges * shape)
    above[-1] = 0.0
    nodes = -np.diff(above) / weights
    return Service(means, edges, weights, nodes, cv, fresh)


@dataclass(frozen=True, slots=True)
class StationaryLaw:
    """Distribution of ``y`` just after a batch has been dispatched."""

    #: Shape (B,). Probability of the states without backlog, as `Service.fresh_means`: there ``y`` is the service time.
    fresh: Array
    #: ``lattice_y``, ``lattice_mass``: Shape (L,). States with backlog.
    lattice_y: Array
    lattice_mass: Array


def solve_chain(rate: float, service: Service) -> StationaryLaw:
    """Return the stationary distribution for a Poisson stream of ``rate`` below the capacity B / means[-1]."""
    batch = len(service.means)
    step = float(service.means[-1]) / _CELLS_PER_SERVICE
    cells = LATTICE_SERVICES * _CELLS_PER_SERVICE
    # The law of a full batch's service time on multiples of the cell, its mean kept.
    on_lattice = lattice_law(1.0, service.cv**2, 1.0 / _CELLS_PER_SERVICE)
    midpoints = (np.arange(cells + len(on_lattice)) + 0.5) * step
    ratio = math.exp(-decay_rate(rate, 1.0, batch, float(service.means[-1]), service.cv) * step)

    # The law of the arrival of a batch's last request, t, in cells around multiples of ``step``.
    ends = (np.arange(4 * cells + len(on_lattice)) + 0.5) * step
    arrival = np.diff(1.0 - poisson_cdf(batch - 1, rate * ends), prepend=0.0)
    backlog_kernel = _backlog_kernel(arrival, on_lattice, cells, ratio)
    entering = _entry_probabilities(rate, step, cells, service)
    backlog = np.linalg.solve(np.eye(cells) - backlog_kernel, entering)

    landing = _transition_probabilities(on_lattice, cells, ratio)
    into_fresh = fresh_probabilities(rate, batch, midpoints) @ (landing @ backlog) + _fresh_from_service(rate, service)
    fresh = _fixed_vector(into_fresh)
    return _normalise_backlog(fresh, backlog @ fresh, ratio, step, on_lattice)


def poisson_cdf(count: int, mean: Array) -> Array:
    """Return P(N <= count) of a Poisson variable, 0 for a negative count."""
    if count < 0:
        return np.zeros_like(mean)
    return np.asarray(gammaincc(count + 1.0, np.maximum(mean, 0.0)), dtype=np.float64)


def poisson_pmf(counts: Array, mean: Array) -> Array:
    """Return P(N = count), broadcast."""
    return np.asarray(np.exp(xlogy(counts, mean) - mean - gammaln(counts + 1.0)), dtype=np.float64)


def fresh_probabilities(rate: float, batch: int, y: Array) -> Array:
    """Return the probability that the next batch leaves no backlog, by state.

    Parameters
    ----------
    y : ndarray of shape (K,)

    Returns
    -------
    ndarray of shape (B, K)
        Batches of 1..B - 1 requests taken when the process comes free, then a request on the idle process.
    """
    by_process = poisson_pmf(np.arange(1, batch)[:, None], rate * y)
    return np.asarray(np.vstack([by_process, np.exp(-rate * y)]))


def _backlog_kernel(arrival: Array, on_lattice: Array, cells: int, ratio: float) -> Array:
    """Return K[i, j]: probability of going from backlog cell j to backlog cell i, as z' = z + S - t."""
    shifts = np.maximum(convolve(on_lattice, arrival[::-1]), 0.0)
    whole = toeplitz(shifts, cells, 4 * cells, len(arrival) - 1)
    return with_tail(whole[:, :cells].copy(), whole[:, cells:], ratio)


def _transition_probabilities(on_lattice: Array, cells: int, ratio: float) -> Array:
    """Return P[i, j]: probability that backlog cell j becomes ``y`` in lattice cell i."""
    rows = cells + len(on_lattice)
    matrix = toeplitz(on_lattice, rows, cells, 0).copy()
    # As `with_tail` of all columns, which would take the square of the rows: 40,000 where times vary much.
    tail = convolve(on_lattice, ratio ** np.arange(1, len(on_lattice) + 1))
    matrix[cells:, -1] += tail[: len(on_lattice)]
    return matrix


def _entry_probabilities(rate: float, step: float, cells: int, service: Service) -> Array:
    """Return E[i, k]: probability of going from the k-th fresh state to backlog cell i."""
    batch = len(service.means)
    starts = (service.fresh_means[:, None] * service.nodes[None, :]).ravel()
    edges = np.arange(cells + 1) * step
    reach = starts[None, :] - edges[:, None]
    longest = float(service.fresh_means.max() * service.nodes.max())
    fine = np.linspace(0.0, max(longest, 1e-300), 1024)
    within = np.interp(reach.ravel(), fine, 1.0 - poisson_cdf(batch - 1, rate * fine), left=0.0)
    mass = -np.diff(within.reshape(reach.shape), axis=0).reshape(cells, batch, len(service.nodes))
    return np.asarray(mass @ service.weights, dtype=np.float64)


def _fresh_from_service(rate: float, service: Service) -> Array:
    """Return F[m, k]: probability of going from the k-th fresh state to the m-th."""
    batch = len(service.means)
    starts = (service.fresh_means[:, None] * service.nodes[None, :]).ravel()
    by_start = fresh_probabilities(rate, batch, starts)
    return np.asarray(by_start.reshape(batch, batch, len(service.nodes)) @ service.weights, dtype=np.float64)


def _fixed_vector(matrix: Array) -> Array:
    """Return the vector v with matrix @ v = v and sum 1, for a matrix with column sums of 1."""
    size = len(matrix)
    matrix = matrix / matrix.sum(axis=0)
    system = matrix - np.eye(size)
    # The equations are redundant: the sum of the probabilities replaces the last.
    system[-1] = 1.0
    unit = np.zeros(size)
    unit[-1] = 1.0
    return np.asarray(np.maximum(np.linalg.solve(system, unit), 0.0))


def _normalise_backlog(fresh: Array, backlog: Array, ratio: float, step: float, on_lattice: Array) -> StationaryLaw:
    landed = np.maximum(convolve(append_tail(np.maximum(backlog, 0.0), ratio), on_lattice), 0.0)
    total = fresh.sum() + landed.sum()
    y = (np.arange(len(landed)) + 0.5) * step
    return StationaryLaw(fresh / total, y, landed / total)
