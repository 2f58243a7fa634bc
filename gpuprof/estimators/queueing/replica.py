"""One process under Poisson requests, solved by its embedded Markov chain."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import gammainc, gammaincinv

from gpuprof.domain.sojourn import BatchServer, Sojourn
from gpuprof.estimators.queueing import batch_chain, batch_sojourn
from gpuprof.estimators.queueing.batch_backlog import Array, limit_threads
from gpuprof.estimators.queueing.scaling import make_overload, pair_quantiles, scale_server, scale_sojourn

#: Negligible probability, per batch, of more arrivals than fit during its run.
_NEVER = 1e-12


def solve_replica(rate_rps: float, server: BatchServer) -> Sojourn:
    """Return the distribution of the time in a stable replica of one process."""
    if server.max_wait_ms == 0.0:
        server = drop_unused_batches(rate_rps, server)
    # In units of the full batch's time, and rounded: models with proportional times share a solution.
    unit_ms = server.latency_ms[server.batch - 1]
    law = _solve(float(f"{rate_rps / 1000.0 * unit_ms:.5g}"), scale_server(server, unit_ms))
    return scale_sojourn(law, unit_ms, server.overhead_ms)


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


@lru_cache(maxsize=100_000)
def _solve(rate: float, server: BatchServer) -> Sojourn:
    """Return the law for ``rate`` requests per unit of time."""
    load = 1000.0 * rate / server.capacity_rps
    if load >= 1.0:
        return make_overload(load, server)
    rate = max(rate, 1e-9)  # the chain needs arrivals
    with limit_threads():
        service = batch_chain.service_of(np.array(server.latency_ms), server.latency_cv, server.pause_factor)
        law = batch_chain.solve(rate, server.max_wait_ms, service)
        waits = batch_sojourn.waiting_law(rate, server.max_wait_ms, service, law)
        times = _list_times(waits, service)
        within = np.maximum.accumulate(batch_sojourn.sojourn_cdf(waits, service, times))
    sizes = waits.batch_sizes
    mean_batch = float(sizes @ np.tile(np.arange(1, server.batch + 1), 2))
    by_request = waits.below[:, -1] + waits.at_once + waits.timer
    mean = waits.mean() + float(by_request @ service.fresh_means)
    busy = min(rate / mean_batch * float(sizes @ service.fresh_means), 1.0)
    return Sojourn(busy, mean_batch, mean, pair_quantiles(within.tolist(), times.tolist()))


def _list_times(waits: batch_sojourn.WaitingLaw, service: batch_chain.Service) -> Array:
    """Return the times at which the law is tabulated: dense around batch times, in a constant ratio in the tail."""
    means = service.fresh_means
    longest = float(waits.waits[-1] + means.max() * service.edges[-1])
    shortest = float(means.min() * service.edges[0])
    jumps = np.concatenate([means, means + waits.max_wait]) if service.cv == 0.0 else np.zeros(0)
    grids = (
        np.linspace(shortest, 4.0 * service.means[-1], 100),
        np.geomspace(float(service.means[0]), longest, 150),
        # Both sides of a step, since interpolation would turn it into a slope.
        jumps,
        jumps * (1.0 - 1e-9),
    )
    return np.unique(np.concatenate(grids))
