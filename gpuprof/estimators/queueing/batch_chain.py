"""One process that serves Poisson requests in batches: its stationary law, by an embedded Markov chain.

The batching rule of `gpuprof.rules.batching` makes the chain tractable. Let R be the arrival of the last request of a
full batch, or the dispatch of a batch that was not full. Arrivals after R are independent of the past, so ``y``, the
time from R until the process is free again, is a Markov chain from batch to batch:

- the next batch is full and dispatched when the process comes free, at ``y``: then ``y' = z + S``, with
  ``z = y - t`` and t the arrival of the batch's last request after R, an Erlang variable;
- or the batch is dispatched by the process coming free or by the timer with n < B requests, or by its B-th
  arrival while the process idles: then ``y' = S`` of n requests, and z is 0.

The chain is solved on a lattice for z > 0, closed by its exponential tail (the root of the Cramér-Lundberg equation),
with the states z = 0 kept apart for each batch size and evaluated off the lattice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincc, gammaincinv, gammaln, ndtr, xlogy

from gpuprof.estimators.queueing.batch_backlog import Array, append_tail, decay_rate, lattice_law, toeplitz, with_tail
from gpuprof.estimators.queueing.scaling import LATTICE_SERVICES

#: Cells of the lattice per full batch's time; the tail is geometric.
_CELLS_PER_SERVICE = 32


@dataclass(frozen=True, slots=True)
class Service:
    """Service times of a batch of 1..B requests: means, and their common shape."""

    means: Array  #: Shape (B,). In any unit of time.
    #: ``edges``, ``weights``, ``nodes``: Shape (Q + 1,), (Q,), (Q,). The distribution divided by its mean (a gamma of
    #: the given coefficient of variation): edges of Q intervals, their probabilities and their conditional means. A
    #: constant has one node and no width.
    edges: Array
    weights: Array
    nodes: Array
    cv: float
    #: Shape (2 B,). Means of the states without backlog: of batches that follow another at once, then of batches on an
    #: idle process, which may take longer.
    fresh_means: Array


def service_of(means: Array, cv: float, pause: float = 1.0) -> Service:
    """Return the service times with these means and this coefficient of variation.

    ``pause``: ratio of a batch's time on an idle process to its time directly after another batch.
    """
    fresh = np.concatenate([means, pause * means])
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
    """Law of ``y`` just after a batch has been dispatched."""

    #: Shape (2 B,). Probability of the states without backlog, by the batch's size, of batches that followed another
    #: and of batches on an idle process: there ``y`` is the service time.
    fresh: Array
    #: ``lattice_y``, ``lattice_mass``: Shape (L,). States with backlog.
    lattice_y: Array
    lattice_mass: Array


def solve(rate: float, max_wait: float, service: Service) -> StationaryLaw:
    """Return the stationary law for a Poisson stream of ``rate`` below the capacity B / means[-1]."""
    batch = len(service.means)
    step = float(service.means[-1]) / _CELLS_PER_SERVICE
    cells = LATTICE_SERVICES * _CELLS_PER_SERVICE
    on_lattice = _on_lattice(service)
    midpoints = (np.arange(cells + len(on_lattice)) + 0.5) * step
    ratio = math.exp(-decay_rate(rate, 1.0, batch, float(service.means[-1]), service.cv) * step)

    arrival = _arrival_law(rate, batch, step, 4 * cells + len(on_lattice))
    backlog_kernel = _backlog_kernel(arrival, on_lattice, cells, ratio)
    live = _reachable_fresh_states(batch, max_wait)
    entering = _entry_probabilities(rate, step, cells, service, live)
    backlog = np.linalg.solve(np.eye(cells) - backlog_kernel, entering)

    landing = _transition_probabilities(on_lattice, cells, ratio)
    into_fresh = fresh_probabilities(rate, max_wait, batch, midpoints)[live] @ (landing @ backlog)
    into_fresh += _fresh_from_service(rate, max_wait, service, live)
    fresh = np.zeros(2 * batch)
    fresh[live] = _fixed_vector(into_fresh)
    return _normalise_backlog(fresh, backlog @ fresh[live], ratio, step, on_lattice)


def poisson_cdf(count: int, mean: Array) -> Array:
    """Return P(N <= count) of a Poisson variable, 0 for a negative count."""
    if count < 0:
        return np.zeros_like(mean)
    return np.asarray(gammaincc(count + 1.0, np.maximum(mean, 0.0)), dtype=np.float64)


def poisson_pmf(counts: Array, mean: Array) -> Array:
    """Return P(N = count), broadcast."""
    return np.asarray(np.exp(xlogy(counts, mean) - mean - gammaln(counts + 1.0)), dtype=np.float64)


def fresh_probabilities(rate: float, max_wait: float, batch: int, y: Array) -> Array:
    """Return, for each n = 1..B, the probability that the next batch has n requests and leaves no backlog.

    Parameters
    ----------
    y : ndarray of shape (K,)

    Returns
    -------
    ndarray of shape (2 B, K)
        First the batches taken when the process comes free, then the batches on an idle process.
    """
    sizes = np.arange(1, batch)[:, None]
    idle = np.exp(-rate * np.maximum(y - max_wait, 0.0))  # the first request is younger than the timer at y
    by_timer = idle * poisson_pmf(sizes - 1.0, np.full((1, 1), rate * max_wait))
    late = np.maximum(y, max_wait)
    ratio = max_wait / np.maximum(late, 1e-300)
    by_process = poisson_pmf(sizes, rate * late) * (1.0 - ratio**sizes)
    filled = np.maximum(poisson_cdf(batch - 1, rate * y) - by_timer.sum(axis=0) - by_process.sum(axis=0), 0.0)
    return np.asarray(np.vstack([by_process, np.zeros_like(filled), by_timer, filled]))


def _reachable_fresh_states(batch: int, max_wait: float) -> Array:
    """Return the fresh states that occur: without a batching delay an idle process takes a single request."""
    if max_wait > 0.0:
        return np.arange(2 * batch)
    return np.append(np.arange(batch - 1), batch)


def _on_lattice(service: Service) -> Array:
    """Return the law of a full batch's service time on multiples of the cell, its mean kept."""
    return lattice_law(1.0, service.cv**2, 1.0 / _CELLS_PER_SERVICE)


def _arrival_law(rate: float, batch: int, step: float, cells: int) -> Array:
    """Return the law of the arrival of a batch's last request, t, in cells around multiples of ``step``."""
    within = 1.0 - poisson_cdf(batch - 1, rate * (np.arange(cells) + 0.5) * step)
    return np.asarray(np.diff(within, prepend=0.0))


def _backlog_kernel(arrival: Array, on_lattice: Array, cells: int, ratio: float) -> Array:
    """Return K[i, j]: probability of going from backlog cell j to backlog cell i, as z' = z + S - t."""
    shifts = np.convolve(on_lattice, arrival[::-1])
    whole = toeplitz(shifts, cells, 4 * cells, len(arrival) - 1)
    return with_tail(whole[:, :cells].copy(), whole[:, cells:], ratio)


def _transition_probabilities(on_lattice: Array, cells: int, ratio: float) -> Array:
    """Return P[i, j]: probability that backlog cell j becomes ``y`` in lattice cell i."""
    rows = cells + len(on_lattice)
    whole = toeplitz(on_lattice, rows, rows, 0)
    return with_tail(whole[:, :cells].copy(), whole[:, cells:], ratio)


def _entry_probabilities(rate: float, step: float, cells: int, service: Service, live: Array) -> Array:
    """Return E[i, k]: probability of going from the k-th live fresh state to backlog cell i."""
    batch = len(service.means)
    starts = (service.fresh_means[live, None] * service.nodes[None, :]).ravel()
    edges = np.arange(cells + 1) * step
    reach = starts[None, :] - edges[:, None]
    longest = float(service.fresh_means.max() * service.nodes.max())
    fine = np.linspace(0.0, max(longest, 1e-300), 1024)
    within = np.interp(reach.ravel(), fine, 1.0 - poisson_cdf(batch - 1, rate * fine), left=0.0)
    mass = -np.diff(within.reshape(reach.shape), axis=0).reshape(cells, len(live), len(service.nodes))
    return np.asarray(mass @ service.weights, dtype=np.float64)


def _fresh_from_service(rate: float, max_wait: float, service: Service, live: Array) -> Array:
    """Return F[m, k]: probability of going from the k-th live fresh state to the m-th."""
    starts = (service.fresh_means[live, None] * service.nodes[None, :]).ravel()
    by_start = fresh_probabilities(rate, max_wait, len(service.means), starts)[live]
    probabilities = by_start.reshape(len(live), len(live), len(service.nodes))
    return np.asarray(probabilities @ service.weights, dtype=np.float64)


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
    landed = np.convolve(append_tail(np.maximum(backlog, 0.0), ratio), on_lattice)
    total = fresh.sum() + landed.sum()
    y = (np.arange(len(landed)) + 0.5) * step
    return StationaryLaw(fresh / total, y, landed / total)
