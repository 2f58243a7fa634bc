"""A request-by-request simulation of a batching replica, as long as asked for, that shares only the batching rule.

The oracle of `bench.queueing` and of the queueing model's tests: no analysis, no variance reduction, random numbers of
its own, and `gpuprof.rules.batching.batch_size_now`, compiled, as the one rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.rules.batching import batch_size_now

_BLOCKS = 20
_WARM_UP = 20  # one in so many requests is thrown away at the start


@dataclass(frozen=True, slots=True)
class Truth:
    """What a long simulation saw, in ms.

    Attributes
    ----------
    mean, p50, p95, p99 : float
    mean_error, p99_error : float
        Standard errors over the value, from the spread over 20 stretches of the simulation.
    """

    mean: float
    p50: float
    p95: float
    p99: float
    mean_error: float
    p99_error: float


def simulate(arrivals: Arrivals, server: BatchServer, requests: int, seed: int) -> NDArray[np.float64]:
    """Return times in the system, ms, in the order of arrival, the first twentieth left out.

    Gaps and service times are gamma; a squared coefficient of variation of 0 makes them constant.
    """
    pause_cv = server.latency_cv if server.pause_cv is None else server.pause_cv
    spent = _simulate(
        seed,
        requests,
        (1000.0 / arrivals.rate_rps, arrivals.scv),
        np.array(server.latency_ms[: server.batch]),
        (server.latency_cv, pause_cv, server.pause_factor),
        server.max_wait_ms,
        server.processes,
    )
    return np.asarray(spent[len(spent) // _WARM_UP :] + server.overhead_ms)


def truth(arrivals: Arrivals, server: BatchServer, requests: int, seed: int, error: float, most: int) -> Truth:
    """Simulate ``requests``, and twice as many until the standard errors are below ``error`` or ``most`` are reached.

    Parameters
    ----------
    error : float
        Of the mean and of p99, as a fraction.
    """
    while True:
        summary = _summary(simulate(arrivals, server, requests, seed))
        if max(summary.mean_error, summary.p99_error) <= error or requests >= most:
            return summary
        requests *= 2


def _summary(spent: NDArray[np.float64]) -> Truth:
    blocks = spent[: len(spent) // _BLOCKS * _BLOCKS].reshape(_BLOCKS, -1)
    mean, tail = blocks.mean(axis=1), np.percentile(blocks, 99, axis=1)
    p50, p95, p99 = np.percentile(spent, (50, 95, 99))
    deviations = [float(each.std(ddof=1) / _BLOCKS**0.5) for each in (mean, tail)]
    return Truth(float(spent.mean()), p50, p95, p99, deviations[0] / float(spent.mean()), deviations[1] / float(p99))


def _gamma_of(mean: float, scv: float) -> float:
    return mean if scv <= 0.0 else np.random.gamma(1.0 / scv, scv * mean)


def _run(
    seed: int,
    requests: int,
    gaps: tuple[float, float],
    latency: NDArray[np.float64],
    noise: tuple[float, float, float],
    max_wait: float,
    processes: int,
) -> NDArray[np.float64]:
    np.random.seed(seed)
    batch = len(latency)
    arrived, spent = np.empty(requests), np.empty(requests)
    now = 0.0
    for i in range(requests):
        now += _gamma(gaps[0], gaps[1])
        arrived[i] = now
    free_at = np.zeros(processes)
    first = 0
    while first + batch < requests:
        process = free_at.argmin()
        now, size = max(free_at[process], arrived[first]), 0
        waiting = 0
        while True:
            while waiting < batch and arrived[first + waiting] <= now:
                waiting += 1
            timer = arrived[first] + max_wait
            waited = max_wait if now >= timer else now - arrived[first]
            size = _size_now(waiting, batch, waited, max_wait)
            if size:
                break
            now = min(arrived[first + waiting], timer)
        rested = now > free_at[process]
        cv = noise[1] if rested else noise[0]
        end = now + latency[size - 1] * _gamma(1.0, cv * cv) * (noise[2] if rested else 1.0)
        free_at[process] = end
        for i in range(first, first + size):
            spent[i] = end - arrived[i]
        first += size
    return spent[:first]


_size_now: Any = numba.njit(batch_size_now)
_gamma: Any = numba.njit(_gamma_of)
_simulate: Any = numba.njit(_run)
