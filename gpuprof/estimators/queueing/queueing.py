"""The default queueing model: one process under Poisson requests is solved, all other cases are simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import gammainc, gammaincinv

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn
from gpuprof.estimators.queueing import batch_chain, batch_sojourn
from gpuprof.estimators.queueing.batch_chain import Array
from gpuprof.estimators.queueing.blas_threads import blas_threads
from gpuprof.estimators.queueing.pool import pair_quantiles, scale_server, scale_sojourn, solve_pool

#: Negligible probability, per batch, of more arrivals than fit during its run.
_NEVER = 1e-12


def drop_unused_batches(rate_rps: float, server: BatchServer) -> BatchServer:
    """Return one process under Poisson requests without the batch sizes that it never reaches.

    Without a batching delay, a batch holds the arrivals during the preceding batch. If at most K requests arrive during
    the longest batch of up to K, no batch exceeds K, and the times of larger batches do not matter. Replicas that
    differ only in those times have the same queue, solved once. ``server``: of one process, with ``max_wait_ms`` of
    zero.
    """
    means = np.maximum.accumulate(np.asarray(server.latency_ms[: server.batch], dtype=float))
    slowest = max(1.0, server.pause_factor)
    if server.latency_cv >= 1e-3:
        shape = server.latency_cv**-2
        slowest *= max(1.0, float(gammaincinv(shape, 1.0 - _NEVER)) / shape)
    sizes = np.arange(1, len(means) + 1)
    enough = np.flatnonzero(gammainc(sizes + 1.0, rate_rps / 1000.0 * slowest * means) < _NEVER)
    if not len(enough) or enough[0] + 1 >= server.batch:
        return server
    batch = int(enough[0]) + 1
    return replace(server, batch=batch, latency_ms=server.latency_ms[:batch])


_REFINEMENTS = 3
_LEAST_RATE = 1e-9  # requests per full batch's time; smaller rates are rounded up


class BatchQueue:
    """Implements `gpuprof.domain.sojourn.QueueModel` for the rules of `gpuprof.rules.batching` and `routing`.

    One process under Poisson requests is solved by its embedded Markov chain (`batch_chain`, `batch_sojourn`). Several
    processes or replicas, other arrivals, batches whose variation differs after a pause, and small batches that take
    several times as long as full ones are simulated request by request (`pool`). Service times are gamma with the given
    coefficient of variation. A server whose batches take longer after a pause is stable if it is stable at full speed.

    Results are cached by ratios of times, which alone matter. `bench.queueing` prints the errors.
    """

    is_analytic = True

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system; infinite times at or beyond capacity."""
        return self.pool(arrivals, (server,)).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas that share the stream."""
        capacity = math.fsum(server.capacity_rps for server in servers)
        load = arrivals.rate_rps / capacity
        if load >= 1.0:
            rates = [arrivals.rate_rps * server.capacity_rps / capacity for server in servers]
            laws = [_overload(load, server) for server in servers]
            return PoolSojourn(laws[0], tuple(map(ServedPart, rates, laws)))
        if len(servers) > 1 or not _is_analysed(arrivals, servers[0]):
            return solve_pool(arrivals, servers, coarse=coarse)
        whole = _analyse(arrivals.rate_rps, servers[0])
        return PoolSojourn(whole, (ServedPart(arrivals.rate_rps, whole),))


def _overload(load: float, server: BatchServer) -> Sojourn:
    return Sojourn(load, float(server.batch), math.inf, ((0.0, math.inf), (1.0, math.inf)))


def _is_analysed(arrivals: Arrivals, server: BatchServer) -> bool:
    longest = max(server.latency_ms[: server.batch]) * max(1.0, server.pause_factor)
    is_alike = server.pause_cv in (None, server.latency_cv)
    # Arrivals during a batch must fit the lattice of `batch_chain`.
    fits = longest <= batch_chain.LATTICE_SERVICES * server.latency_ms[server.batch - 1]
    is_poisson = arrivals.process is None and abs(arrivals.scv - 1.0) < 1e-3
    return server.processes == 1 and is_poisson and is_alike and fits


def _analyse(rate_rps: float, server: BatchServer) -> Sojourn:
    if server.max_wait_ms == 0.0:
        server = drop_unused_batches(rate_rps, server)
    # In units of the full batch's time, and rounded: models with proportional times share a solution.
    unit_ms = server.latency_ms[server.batch - 1]
    law = _solve(float(f"{rate_rps / 1000.0 * unit_ms:.5g}"), scale_server(server, unit_ms))
    return scale_sojourn(law, unit_ms, server.overhead_ms)


@lru_cache(maxsize=100_000)
def _solve(rate: float, server: BatchServer) -> Sojourn:
    """Return the law for ``rate`` requests per unit of time."""
    load = 1000.0 * rate / server.capacity_rps
    if load >= 1.0:
        return _overload(load, server)
    with blas_threads().limit(limits=1, user_api="blas"):  # waking threads costs more than such small matrices
        return _solve_chain(max(rate, _LEAST_RATE), server)


def _solve_chain(rate: float, server: BatchServer) -> Sojourn:
    service = batch_chain.service_of(np.array(server.latency_ms), server.latency_cv, server.pause_factor)
    law = batch_chain.solve(rate, server.max_wait_ms, service)
    waits = batch_sojourn.waiting_law(rate, server.max_wait_ms, service, law)
    sizes = waits.batch_sizes
    mean_batch = float(sizes @ np.tile(np.arange(1, server.batch + 1), 2))
    by_request = waits.below[:, -1] + waits.at_once + waits.timer
    mean = waits.mean() + float(by_request @ service.fresh_means)
    times, within = _tabulate(waits, service)
    busy = min(rate / mean_batch * float(sizes @ service.fresh_means), 1.0)
    return Sojourn(busy, mean_batch, mean, pair_quantiles(within, times))


def _tabulate(waits: batch_sojourn.WaitingLaw, service: batch_chain.Service) -> tuple[Array, Array]:
    """Return times with their cumulative probabilities, dense where the probability climbs."""
    means = service.fresh_means
    longest = float(waits.waits[-1] + means.max() * service.edges[-1])
    shortest = float(means.min() * service.edges[0])
    jumps = np.concatenate([means, means + waits.max_wait]) if service.cv == 0.0 else np.zeros(0)
    times = np.concatenate(
        [
            np.linspace(shortest, 4.0 * service.means[-1], 40),
            batch_chain.geometric_grid(float(service.means[0]), longest, 40),
            jumps,
        ]
    )
    # Both sides of a step, since interpolation would turn it into a slope.
    times = np.unique(np.concatenate([times, jumps * (1.0 - 1e-9)]))
    within = batch_sojourn.sojourn_cdf(waits, service, times)
    for _ in range(_REFINEMENTS):
        between = _steep(times, within)
        if not len(between):
            break
        times = np.concatenate([times, between])
        within = np.concatenate([within, batch_sojourn.sojourn_cdf(waits, service, between)])
        order = np.argsort(times)
        times, within = times[order], within[order]
    return times, np.maximum.accumulate(within)


def _steep(times: Array, within: Array) -> Array:
    """Return additional times in intervals where the probability climbs too far to interpolate."""
    # In the tail, decisive for SLOs at high percentiles, steps are measured in the logarithm of the remaining
    # probability.
    remaining = np.maximum(1.0 - within, 1e-5)
    steep = (np.diff(within) > 0.03) | ((np.log(remaining[:-1] / remaining[1:]) > 0.35) & (within[1:] > 0.9))
    # A step of the law itself stays steep at any resolution.
    steep &= np.diff(times) > 1e-4 * times[1:]
    start, width = times[:-1][steep], np.diff(times)[steep]
    return np.asarray((start[:, None] + width[:, None] * np.array([0.25, 0.5, 0.75])).ravel(), dtype=np.float64)
