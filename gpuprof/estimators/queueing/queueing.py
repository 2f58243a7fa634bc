"""The default queueing model: analytic for a single process under Poisson arrivals, else by simulation.

For searches that verify their choice, a formula guesses the load that equal replicas sustain within a limit. In a busy
pool, batches grow until they hold the arrivals of their own duration. A request waits for a part of the preceding
batch, a batch with more than the mean number of requests takes longer, and close to capacity a backlog adds an
exponential tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn
from gpuprof.estimators.queueing.scaling import LATTICE_SERVICES, make_overload

Array = NDArray[Any]

#: Part of the preceding batch that a request waits for where batches stay far from full.
_SYNCHRONISED = 0.4
#: Largest correlation of successive batch sizes.
_MOST_CORRELATED = 0.95


class BatchQueue:
    """Implements `gpuprof.domain.sojourn.QueueModel` for the rules of `gpuprof.rules.batching` and `routing`.

    A single process under Poisson arrivals is solved by its embedded Markov chain (`replica`). Several processes or
    replicas, other arrivals, batching delays, batches whose variation differs after a pause, and small batches that
    take several times as long as full ones are simulated request by request (`pool`). Service times have a gamma
    distribution with the given coefficient of variation. Longer batches after a pause do not affect stability.

    Results depend only on ratios of times, by which they are cached. `bench.queueing` prints the errors.
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
            laws = [make_overload(load, server) for server in servers]
            return PoolSojourn(laws[0], tuple(map(ServedPart, rates, laws)))
        # SciPy takes a third of a second to import: plans for a part of the SLO never need it.
        if len(servers) > 1 or not _is_analysed(arrivals, servers[0]):
            from gpuprof.estimators.queueing.pool import solve_pool

            return solve_pool(arrivals, servers, coarse=coarse)
        from gpuprof.estimators.queueing.replica import solve_replica

        whole = solve_replica(arrivals.rate_rps, servers[0])
        return PoolSojourn(whole, (ServedPart(arrivals.rate_rps, whole),))

    def guess_load(self, server: BatchServer, count: int, limit_ms: float, percent: float) -> float:
        """Return the approximate largest load at which equal replicas answer in time, by a formula."""
        return _guess_load(server, count, limit_ms, percent)


def _is_analysed(arrivals: Arrivals, server: BatchServer) -> bool:
    full_ms = server.latency_ms[server.batch - 1]
    longest = max(server.latency_ms[: server.batch]) * max(1.0, server.pause_factor)
    is_alike = server.pause_cv in (None, server.latency_cv)
    is_delayed = server.max_wait_ms > 1e-9 * full_ms
    # Arrivals during a batch must fit the lattice of `batch_chain`.
    fits = longest <= LATTICE_SERVICES * full_ms
    is_poisson = arrivals.process is None and abs(arrivals.scv - 1.0) < 1e-3
    return server.processes == 1 and is_poisson and is_alike and fits and not is_delayed


@lru_cache(maxsize=100_000)
def _guess_load(server: BatchServer, count: int, limit_ms: float, percent: float) -> float:
    """Return the approximate largest load, as a fraction of the capacity, at which ``count`` replicas answer in time.

    ``percent``: percentage of the requests within ``limit_ms``. Arrivals are Poisson.
    """
    sizes = _list_sizes(server.batch)
    times = np.interp(sizes, np.arange(1, server.batch + 1), server.latency_ms[: server.batch])
    rates = np.maximum.accumulate(sizes / times)
    tails = _guess_tails(server, count * server.processes, sizes, times, rates, 1.0 - percent / 100.0)
    in_time = rates[tails <= limit_ms - server.overhead_ms]
    full_rate = server.batch / server.latency_ms[server.batch - 1]
    return min(float(in_time[-1]) / full_rate, 0.999) if len(in_time) else 0.0


@lru_cache(maxsize=1_000)
def _list_sizes(batch: int) -> Array:
    """Return mean batch sizes up to the full batch; a size below one is the fraction of time a process is busy."""
    near_full = batch * (1.0 - np.geomspace(1e-3, 0.5, 40)) if batch > 1 else 1.0 - np.geomspace(1e-3, 0.5, 40)
    return np.unique(np.concatenate([np.linspace(0.02, 1.0, 25), np.linspace(1.0, batch, 4 * batch), near_full]))[:-1]


def _guess_tails(server: BatchServer, processes: int, sizes: Array, times: Array, rates: Array, late: float) -> Array:
    """Return the time at the percentile for each mean batch size; ``late``: fraction of requests beyond it."""
    score, cv = NormalDist().inv_cdf(1.0 - late), server.latency_cv
    means = np.asarray(server.latency_ms[: server.batch])
    numbers, is_idle = np.arange(1, server.batch + 1), sizes <= 1.0
    fill = sizes / server.batch if server.batch > 1 else np.ones(len(sizes))
    slope = np.interp(sizes + 1.0, numbers, means) - times
    # A long batch collects more requests for the next: sizes are autoregressive.
    correlation = np.clip(rates * slope, -_MOST_CORRELATED, _MOST_CORRELATED)
    spread = np.sqrt(sizes / (1.0 - correlation**2) / processes ** (fill / 2.0))
    large = np.minimum(server.batch, sizes + score * spread)
    if processes > 1:
        large = np.where(is_idle, 1.0, large)  # idle processes take requests one by one
    load = rates / float((numbers / means).max())
    wait_probability = np.minimum(sizes, 1.0) ** (math.sqrt(2.0 * (processes + 1)) - 1.0)  # Sakasegawa's, of M/M/c
    waited = np.maximum(1.0 / processes, _SYNCHRONISED * (1.0 - fill))
    # The rest of the batch that a request finds is evenly distributed.
    waited = np.where(is_idle, np.maximum(0.0, 1.0 - late / wait_probability) / processes, waited)
    excess = np.hypot(np.interp(large, numbers, means) - times, score * cv * times)
    backlog_ms = means[-1] * (1.0 / server.batch + cv**2) / 2.0 * load / np.maximum(1.0 - load, 1e-9) / processes
    backlog = backlog_ms * np.log(np.maximum(1.0, wait_probability * load / late))
    pause = np.where(sizes <= 1.5, server.pause_factor, 1.0)
    return np.asarray((times * (1.0 + waited) + excess * (1.0 + waited / 2.0)) * pause + backlog)
