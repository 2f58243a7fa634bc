"""Pools with independent request streams, as under random routing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, ServedPart, Sojourn

#: Relative precision of the common tail of all replicas.
_PRECISION = 1e-7
#: Milliseconds, 30 years: a rate that needs a longer tail exceeds the replicas' capacity.
_LONGEST_MS = 1e12


def split_stream(queueing: QueueModel, arrivals: Arrivals, servers: Sequence[BatchServer]) -> PoolSojourn:
    """Return the times in replicas with independent streams at rates proportional to capacity."""
    capacity = math.fsum(server.capacity_rps for server in servers)
    parts = []
    for server in servers:
        rate = arrivals.rate_rps * server.capacity_rps / capacity
        parts.append(ServedPart(rate, queueing.sojourn(Arrivals(rate, arrivals.scv), server)))
    return PoolSojourn(mix_parts(parts), tuple(parts))


def balance_stream(
    queueing: QueueModel,
    arrivals: Arrivals,
    servers: Sequence[BatchServer],
    largest_rps: Callable[[BatchServer, float], float],
) -> PoolSojourn:
    """Return the times in replicas with independent streams at rates that equalise their tails.

    If any split keeps every replica's tail within a time, this split does. ``largest_rps`` returns the largest rate at
    which a replica's tail is within a time in ms.
    """
    kinds = Counter(servers)

    def served_rps(limit_ms: float) -> float:
        return math.fsum(count * largest_rps(server, limit_ms) for server, count in kinds.items())

    low, high = 0.0, 1.0
    while served_rps(high) < arrivals.rate_rps and high < _LONGEST_MS:
        low, high = high, 2.0 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if served_rps(middle) >= arrivals.rate_rps else (middle, high)
    # The upper end of the bisection serves slightly more than the arrivals: rates are scaled to their sum.
    scale = arrivals.rate_rps / (served_rps(high) or 1.0)
    rates = {server: scale * largest_rps(server, high) for server in kinds}
    parts = {server: ServedPart(rate, queueing.sojourn(Arrivals(rate), server)) for server, rate in rates.items()}
    server_parts = [parts[server] for server in servers]
    return PoolSojourn(mix_parts(server_parts), tuple(server_parts))


def mix_parts(parts: Sequence[ServedPart]) -> Sojourn:
    """Return the distribution over the requests of all parts."""
    laws = [part.sojourn for part in parts]
    if all(law == laws[0] for law in laws):
        return laws[0]
    total = math.fsum(part.rate_rps for part in parts)
    weights = [part.rate_rps / total if total else 1.0 / len(parts) for part in parts]
    times = sorted({ms for law in laws for _, ms in law.quantiles_ms if math.isfinite(ms)})
    # Between adjacent times every distribution is linear, and so is the mixture.
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
