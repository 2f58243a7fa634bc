"""A request-by-request simulation of a batching replica that shares no code with the queueing model."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from gpuprof.batching import batch_size_now
from gpuprof.sojourn import Arrivals, BatchServer


def simulate(arrivals: Arrivals, server: BatchServer, requests: int, seed: int) -> NDArray[np.float64]:
    """Return times in the system, ms, in the order of arrival, of a queue that obeys `batch_size_now`."""
    random = np.random.default_rng(seed)
    gap = 1000.0 / arrivals.rate_rps
    arrived = np.cumsum(random.gamma(1.0 / arrivals.scv, arrivals.scv * gap, requests)).tolist()
    noise = _noise(random, server.latency_cv, requests)
    paused = noise if server.pause_cv is None else _noise(random, server.pause_cv, requests)
    free_at = [0.0] * server.processes
    spent: list[float] = []
    first = 0
    while first + server.batch < requests:
        free = heapq.heappop(free_at)
        size, now = _next_batch(arrived, first, free, server)
        slow = server.pause_factor * paused[first] if now > free else noise[first]
        done = now + server.latency_ms[size - 1] * slow
        heapq.heappush(free_at, done)
        spent.extend(done - at + server.overhead_ms for at in arrived[first : first + size])
        first += size
    return np.array(spent[len(spent) // 20 :])


def _noise(random: np.random.Generator, cv: float, count: int) -> list[float]:
    return random.gamma(cv**-2, cv**2, count).tolist() if cv else [1.0] * count


def _next_batch(arrived: list[float], first: int, free: float, server: BatchServer) -> tuple[int, float]:
    """Return the size of the next batch and when it starts: the first event at which the rule lets it go."""
    moments = sorted(
        {free, *(at for at in arrived[first : first + server.batch] if at > free), arrived[first] + server.max_wait_ms}
    )
    for now in moments:
        if now < free:
            continue
        waiting = sum(1 for at in arrived[first : first + server.batch] if at <= now)
        waited = now - arrived[first] if waiting else 0.0
        if now == arrived[first] + server.max_wait_ms:
            waited = server.max_wait_ms
        if size := batch_size_now(waiting, server.batch, waited, server.max_wait_ms):
            return size, now
    raise AssertionError("the timer lets every batch go")
