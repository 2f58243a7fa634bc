"""One process under Poisson requests without a batching delay: the time in the system, from its embedded Markov chain.

For every batch size n, the expected number of requests in a batch of n with a wait of at most w, given the time ``y``
until the process is free, has a closed form for Poisson arrivals. The form is averaged over the stationary ``y``; then
the service time of n is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import gammainc, gammaincinv

from gpuprof.domain.sojourn import BatchServer, Sojourn
from gpuprof.estimators.queueing.batch_chain import (
    TAIL_MASS,
    Array,
    Service,
    StationaryLaw,
    convolve,
    fresh_probabilities,
    limit_threads,
    poisson_cdf,
    poisson_pmf,
    service_of,
    solve_chain,
)
from gpuprof.estimators.queueing.scaling import make_overload, pair_quantiles, scale_server, scale_sojourn


def solve_replica(rate_rps: float, server: BatchServer) -> Sojourn:
    """Return the distribution of the time in a stable replica of one process."""
    server = drop_unused_batches(rate_rps, server)
    # In units of the full batch's time, and rounded: models with proportional times share a solution.
    unit_ms = server.latency_ms[server.batch - 1]
    law = _solve(float(f"{rate_rps / 1000.0 * unit_ms:.5g}"), scale_server(server, unit_ms))
    return scale_sojourn(law, unit_ms, server.overhead_ms)


def drop_unused_batches(rate_rps: float, server: BatchServer) -> BatchServer:
    """Return one process under Poisson requests without the batch sizes that it never reaches.

    A batch holds the arrivals during the preceding batch. If at most K requests arrive during the longest batch of up
    to K, no batch exceeds K, and the times of larger batches do not matter. Replicas that differ only in those times
    have the same queue, solved once.
    """
    means = np.maximum.accumulate(np.asarray(server.latency_ms[: server.batch], dtype=float))
    slowest = max(1.0, server.pause_factor)
    if server.latency_cv >= 1e-3:
        shape = server.latency_cv**-2
        slowest *= max(1.0, float(gammaincinv(shape, 1.0 - TAIL_MASS)) / shape)
    sizes = np.arange(1, len(means) + 1)
    enough = np.flatnonzero(gammainc(sizes + 1.0, rate_rps / 1000.0 * slowest * means) < TAIL_MASS)
    if not len(enough) or enough[0] + 1 >= server.batch:
        return server
    batch = int(enough[0]) + 1
    return replace(server, batch=batch, latency_ms=server.latency_ms[:batch])


@lru_cache(maxsize=100_000)
def _solve(rate: float, server: BatchServer) -> Sojourn:
    """Return the distribution for ``rate`` requests per unit of time."""
    load = 1000.0 * rate / server.capacity_rps
    if load >= 1.0:
        return make_overload(load, server)
    rate = max(rate, 1e-9)  # the chain needs arrivals
    with limit_threads():
        service = service_of(np.array(server.latency_ms), server.latency_cv, server.pause_factor)
        waits = find_waits(rate, service, solve_chain(rate, service))
        times = _list_times(waits, service)
        within = np.maximum.accumulate(_sojourn_cdf(waits, service, times))
    idle_ms = float(service.fresh_means[-1])
    mean_batch = float(waits.batch_sizes @ np.arange(1, server.batch + 1)) + waits.idle_batches
    mean = waits.mean() + float(waits.below[:, -1] @ service.means) + waits.idle * idle_ms
    busy = rate / mean_batch * (float(waits.batch_sizes @ service.means) + waits.idle_batches * idle_ms)
    return Sojourn(min(busy, 1.0), mean_batch, mean, pair_quantiles(within.tolist(), times.tolist()))


def _list_times(waits: WaitingLaw, service: Service) -> Array:
    """Return the times at which the distribution is tabulated: dense around batch times, geometric in the tail."""
    means = np.append(service.means, service.fresh_means[-1])
    longest = float(waits.waits[-1] + means.max() * service.edges[-1])
    shortest = float(means.min() * service.edges[0])
    jumps = means if service.cv == 0.0 else np.zeros(0)
    grids = (
        np.linspace(shortest, 4.0 * service.means[-1], 100),
        np.geomspace(float(service.means[0]), longest, 150),
        # Both sides of a step, since interpolation would turn it into a slope.
        jumps,
        jumps * (1.0 - 1e-9),
    )
    return np.unique(np.concatenate(grids))


@dataclass(frozen=True, slots=True)
class WaitingLaw:
    """Waits of the requests by the size of their batch, if it follows another; on an idle process they do not wait."""

    waits: Array  #: Shape (K,). Increasing, from 0.
    below: Array  #: Shape (B, K). Probability that a request leaves in a batch of n after waiting at most ``waits``.
    idle: float  #: Probability that a request comes upon an idle process.
    batch_sizes: Array  #: Shape (B,). Probability that a batch has n requests and follows another.
    idle_batches: float  #: Probability that a batch is a request on an idle process.

    def mean(self) -> float:
        """Return the mean wait."""
        within = self.below.sum(axis=0)
        return float(np.sum(np.diff(self.waits) * (within[-1] - 0.5 * (within[1:] + within[:-1]))))


def find_waits(rate: float, service: Service, law: StationaryLaw) -> WaitingLaw:
    """Return the law of the waits for a Poisson stream of ``rate`` and the stationary law of the chain."""
    batch = len(service.means)
    y, mass = _points(rate, service, law)
    waits = _wait_grid(service, law)
    *fresh, idle = (fresh_probabilities(rate, batch, y) @ mass).tolist()
    taken = rate * poisson_pmf(np.arange(batch - 1.0)[:, None], rate * y) * mass
    below = np.vstack([taken @ np.minimum(y[:, None], waits[None, :]), _full_on_release(rate, service, law, waits)])
    # 1 except for losses by the lattice and by the cut tails.
    total = below[:, -1].sum() + idle
    # The rest are full batches that leave or follow a backlog.
    sizes = np.array([*fresh, 1.0 - sum(fresh) - idle])
    return WaitingLaw(waits, below / total, idle / total, sizes, idle)


def _sojourn_cdf(waits: WaitingLaw, service: Service, times: Array) -> Array:
    """Return the probability that wait and service together last at most ``times``."""
    result = waits.idle * _service_cdf(times, float(service.fresh_means[-1]), service.cv)
    for n, mean in enumerate(service.means):
        if waits.below[n, -1] > TAIL_MASS:
            remaining = times[None, :] - mean * service.nodes[:, None]
            result += service.weights @ np.interp(remaining, waits.waits, waits.below[n], left=0.0)
    return np.minimum(result, 1.0)


def _service_cdf(times: Array, mean: float, cv: float) -> Array:
    if cv == 0.0:
        # A time equal to the mean up to rounding counts as within.
        return np.asarray(times >= mean * (1.0 - 1e-12), dtype=np.float64)
    shape = 1.0 / cv**2
    return np.asarray(gammainc(shape, shape * np.maximum(times, 0.0) / mean), dtype=np.float64)


def _points(rate: float, service: Service, law: StationaryLaw) -> tuple[Array, Array]:
    """Return each y after which a partial batch can follow, and its probability: fresh states, then the lattice."""
    batch = len(service.means)
    fresh_y = (service.fresh_means[:, None] * service.nodes).ravel()
    fresh_mass = (law.fresh[:, None] * service.weights).ravel()
    mask = fresh_mass > TAIL_MASS
    # A Poisson number with this mean is below B with a probability below 1e-9, for every B up to 512.
    end = int(np.searchsorted(law.lattice_y * rate, batch + 6.0 * batch**0.5 + 14.0))
    return (
        np.concatenate([fresh_y[mask], law.lattice_y[:end]]),
        np.concatenate([fresh_mass[mask], law.lattice_mass[:end]]),
    )


def _wait_grid(service: Service, law: StationaryLaw) -> Array:
    """Return a grid of waits: all kinks, fine up to the shortest service time, coarse in the tail."""
    means = np.append(service.means, service.fresh_means[-1])
    step = 2.0 * law.lattice_y[0]
    last = max(float(law.lattice_y[-1]) + 0.5 * step, float(means.max() * service.edges[-1])) + step
    parts = [
        np.arange(0.0, min(4.0 * means.max(), last), step),
        np.geomspace(float(means.max()), last, 48) if last > means.max() else np.array([last]),
        np.linspace(0.0, 2.0 * means[0], 33),
        means,
        np.array([last]),
    ]
    return np.unique(np.concatenate(parts))


def _full_on_release(rate: float, service: Service, law: StationaryLaw, waits: Array) -> Array:
    """Return the waits in full batches that start when the process becomes free, for each of their B requests."""
    batch = len(service.means)
    step = 2.0 * law.lattice_y[0]
    mass = _with_fresh(service, law, step)
    centres = (np.arange(len(mass)) + 0.5) * step
    # E[min(N, B)] of a Poisson N.
    batch_means = rate * centres * poisson_cdf(batch - 2, rate * centres)
    batch_means += batch * (1.0 - poisson_cdf(batch - 1, rate * centres))
    # Requests that arrived more than w before the release are those among the first B of (0, y - w). From its middle on
    # the convolution is the sum over y of mass(y) taken(y - k step), for k from 0 on.
    older = convolve(mass, batch_means[::-1])[len(mass) - 1 :]
    within = float(mass @ batch_means) - np.append(older, 0.0)
    partial = mass * poisson_cdf(batch - 2, rate * centres) * rate
    weight, moment = np.append(0.0, np.cumsum(partial)), np.append(0.0, np.cumsum(partial * centres))
    edges = np.arange(len(mass) + 1) * step
    not_full = moment + edges * (weight[-1] - weight)
    return np.interp(waits, edges, np.maximum.accumulate(np.maximum(within - not_full, 0.0)))


def _with_fresh(service: Service, law: StationaryLaw, step: float) -> Array:
    """Return the distribution of y on the lattice's cells; fresh states are split over the two nearest cells."""
    place = (service.fresh_means[:, None] * service.nodes).ravel() / step - 0.5
    share = (law.fresh[:, None] * service.weights).ravel()
    place = np.maximum(place, 0.0)
    cell = place.astype(np.int64)
    mass = np.zeros(max(len(law.lattice_mass), int(cell.max()) + 2))
    mass[: len(law.lattice_mass)] = law.lattice_mass
    np.add.at(mass, cell, share * (1.0 - (place - cell)))
    np.add.at(mass, cell + 1, share * (place - cell))
    return mass
