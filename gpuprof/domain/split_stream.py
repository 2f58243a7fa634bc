"""Replicas with independent request streams, as a router gives them that assigns requests at random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, ServedPart, Sojourn

#: Relative, of the tail that all replicas are to have.
_PRECISION = 1e-7
#: Milliseconds, 30 years: where no tail is long enough for the rate, the replicas cannot serve it.
_LONGEST_MS = 1e12


def split_stream(queueing: QueueModel, arrivals: Arrivals, servers: Sequence[BatchServer]) -> PoolSojourn:
    """Return the times in replicas that get independent streams, each in proportion to its capacity."""
    capacity = math.fsum(one.capacity_rps for one in servers)
    parts = []
    for one in servers:
        rate = arrivals.rate_rps * one.capacity_rps / capacity
        parts.append(ServedPart(rate, queueing.sojourn(Arrivals(rate, arrivals.scv), one)))
    return PoolSojourn(mix_parts(parts), tuple(parts))


def balance_stream(
    queueing: QueueModel,
    arrivals: Arrivals,
    servers: Sequence[BatchServer],
    largest_rps: Callable[[BatchServer, float], float],
) -> PoolSojourn:
    """Return the times in replicas that get independent streams of such rates that all have the same tail.

    Where some split keeps every replica's tail within a time, this one does. ``largest_rps`` tells the rate up to
    which a replica's tail is within a time in ms.
    """
    kinds = Counter(servers)

    def served_rps(limit_ms: float) -> float:
        return math.fsum(count * largest_rps(one, limit_ms) for one, count in kinds.items())

    low, high = 0.0, 1.0
    while served_rps(high) < arrivals.rate_rps and high < _LONGEST_MS:
        low, high = high, 2.0 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if served_rps(middle) >= arrivals.rate_rps else (middle, high)
    # The upper end of the bisection serves a little more than is asked: rates are scaled so that they add up to it.
    scale = arrivals.rate_rps / (served_rps(high) or 1.0)
    rates = {one: scale * largest_rps(one, high) for one in kinds}
    parts = {one: ServedPart(rate, queueing.sojourn(Arrivals(rate), one)) for one, rate in rates.items()}
    own = [parts[one] for one in servers]
    return PoolSojourn(mix_parts(own), tuple(own))


def mix_parts(parts: Sequence[ServedPart]) -> Sojourn:
    """Return the distribution over the requests of all parts."""
    laws = [part.sojourn for part in parts]
    if all(law == laws[0] for law in laws):
        return laws[0]
    total = math.fsum(part.rate_rps for part in parts)
    weights = [part.rate_rps / total if total else 1.0 / len(parts) for part in parts]
    times = sorted({ms for law in laws for _, ms in law.quantiles_ms if math.isfinite(ms)})
    # Between the times of all, every distribution is linear, and so is their sum.
    mixed = [
        (math.fsum(weight * law.fraction_within(ms) for weight, law in zip(weights, laws, strict=True)), ms)
        for ms in times
    ]
    if any(math.isinf(law.mean_ms) for law in laws):
        mixed.append((1.0, math.inf))
    return Sojourn(
        math.fsum(weight * law.utilization for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_batch for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_ms for weight, law in zip(weights, laws, strict=True)),
        ((0.0, mixed[0][1]), *mixed),
    )
