"""The default queueing model of a batching replica: solved for one process and Poisson arrivals, else simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.estimators.queueing import batch_chain, batch_sojourn
from gpuprof.estimators.queueing.batch_chain import Array

_REFINEMENTS = 3
_LEAST_RATE = 1e-9  # requests in a full batch's time; less is as good as none
_NO_WAIT = 1e-9  # of a batch's time; less is none
_PROBABILITIES = np.unique(
    np.concatenate([np.linspace(0.0, 0.95, 39), 1.0 - np.geomspace(0.05, 5e-5, 31), [0.5, 0.9, 0.99, 0.999, 0.9999]])
)


class BatchQueue:
    """Implements `gpuprof.domain.sojourn.QueueModel` for the rule of `gpuprof.rules.batching`.

    One process under Poisson requests is solved by its embedded Markov chain (`batch_chain`, `batch_sojourn`).
    Several processes, arrivals of another variability (renewals with gamma gaps), or batches whose variation differs
    after a pause are simulated request by request with fixed random numbers; the backlog, which makes plain
    simulations so long near capacity, is taken from analysis (`batch_simulation`). Service times are gamma with the
    given coefficient of variation. A server whose batches take longer after a pause is stable as long as it is at
    full speed.
    Against simulations of millions of requests (`bench.queueing`) both are within 3% at the mean and 5% at p99 from
    10% to 90% of the capacity.
    Results are cached; the cache knows that only ratios of times matter.
    """

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system; infinite times at or beyond capacity."""
        unit = server.latency_ms[server.batch - 1]
        replica = _Replica(
            tuple(_rounded(latency / unit) for latency in server.latency_ms[: server.batch]),
            _rounded(server.max_wait_ms / unit) if server.max_wait_ms > _NO_WAIT * unit else 0.0,
            server.processes,
            round(server.latency_cv, 4),
            _rounded(server.pause_factor),
            round(server.latency_cv if server.pause_cv is None else server.pause_cv, 4),
        )
        law = _solve(_rounded(arrivals.rate_rps / 1000.0 * unit), round(arrivals.scv, 4), replica)
        return _scaled(law, unit, server.overhead_ms)


@dataclass(frozen=True, slots=True)
class _Replica:
    """A `BatchServer` with times in units of a full batch's."""

    latency: tuple[float, ...]
    max_wait: float
    processes: int
    cv: float
    pause: float
    pause_cv: float


def _rounded(value: float) -> float:
    """Round to five significant digits: nobody knows more of a latency, and the cache hits more often."""
    return float(f"{value:.5g}")


def _scaled(law: Sojourn, unit: float, overhead: float) -> Sojourn:
    return Sojourn(
        law.utilization,
        law.mean_batch,
        law.mean_ms * unit + overhead,
        tuple([(p, t * unit + overhead) for p, t in law.quantiles_ms]),
    )


@lru_cache(maxsize=100_000)
def _solve(rate: float, scv: float, replica: _Replica) -> Sojourn:
    batch = len(replica.latency)
    load = rate / (batch * replica.processes)
    if load >= 1.0:
        return Sojourn(load, float(batch), math.inf, ((0.0, math.inf), (1.0, math.inf)))
    with _threads().limit(limits=1, user_api="blas"):  # waking threads for matrices this small costs more than they do
        if replica.processes == 1 and abs(scv - 1.0) < 1e-3 and replica.cv == replica.pause_cv:
            return _exact(max(rate, _LEAST_RATE), replica)
        return _simulated(max(rate, _LEAST_RATE), scv, replica)


@cache
def _threads() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def _simulated(rate: float, scv: float, replica: _Replica) -> Sojourn:
    from gpuprof.estimators.queueing.batch_simulation import Queue, simulate  # numba takes a while to import

    queue = Queue(
        rate,
        scv,
        replica.max_wait,
        np.array(replica.latency),
        replica.cv,
        replica.processes,
        replica.pause,
        replica.pause_cv,
    )
    sample = simulate(queue, _PROBABILITIES)
    busy = rate / sample.mean_batch * sample.mean_service / replica.processes
    return Sojourn(min(busy, 1.0), sample.mean_batch, sample.mean, _pairs(_PROBABILITIES, sample.times))


def _exact(rate: float, replica: _Replica) -> Sojourn:
    service = batch_chain.service_of(np.array(replica.latency), replica.cv, replica.pause)
    law = batch_chain.solve(rate, replica.max_wait, service)
    waits = batch_sojourn.waiting(rate, replica.max_wait, service, law)
    sizes = waits.batch_sizes
    mean_batch = float(sizes @ np.tile(np.arange(1, len(replica.latency) + 1), 2))
    by_request = waits.below[:, -1] + waits.at_once + waits.timer
    mean = waits.mean() + float(by_request @ service.fresh_means)
    times, within = _tabulate(waits, service)
    busy = min(rate / mean_batch * float(sizes @ service.fresh_means), 1.0)
    return Sojourn(busy, mean_batch, mean, _pairs(within, times))


def _tabulate(waits: batch_sojourn.Waiting, service: batch_chain.Service) -> tuple[Array, Array]:
    """Return times and the probabilities of being answered within them, dense where the probability climbs."""
    means = service.fresh_means
    longest = float(waits.waits[-1] + means.max() * service.edges[-1])
    shortest = float(means.min() * service.edges[0])
    jumps = np.concatenate([means, means + waits.max_wait]) if service.cv == 0.0 else np.zeros(0)
    times = np.concatenate(
        [
            np.linspace(shortest, 4.0 * service.means[-1], 40),
            batch_chain.geometric(float(service.means[0]), longest, 40),
            jumps,
        ]
    )
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
    """Return times to add in the intervals over which the probability climbs too far to interpolate in."""
    remaining = np.maximum(1.0 - within, 1e-5)
    steep = (np.diff(within) > 0.03) | ((np.log(remaining[:-1] / remaining[1:]) > 0.35) & (within[1:] > 0.9))
    steep &= np.diff(times) > 1e-4 * times[1:]
    start, width = times[:-1][steep], np.diff(times)[steep]
    return np.asarray((start[:, None] + width[:, None] * np.array([0.25, 0.5, 0.75])).ravel(), dtype=np.float64)


def _pairs(probabilities: Array, times: Array) -> tuple[tuple[float, float], ...]:
    """Return the table of quantiles from probability 0 to 1."""
    last = int(np.searchsorted(probabilities, 0.99999)) + 1
    table = list(zip(probabilities[:last].tolist(), times[:last].tolist(), strict=True))
    if table[0][0] > 0.0:
        table.insert(0, (0.0, table[0][1]))
    return (*table[:-1], (max(table[-1][0], 0.99999), table[-1][1]))
