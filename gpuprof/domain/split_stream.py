"""Replicas as if each had a stream of its own: what a router does that deals requests out by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, ServedPart, Sojourn

_PROBABILITIES = (*(percent / 100.0 for percent in range(0, 95)), *(1.0 - 0.05 * 0.8**step for step in range(32)))


def split_stream(queueing: QueueModel, arrivals: Arrivals, servers: Sequence[BatchServer]) -> PoolSojourn:
    """Return the times in replicas that get independent streams, each in proportion to its capacity."""
    capacity = math.fsum(one.capacity_rps for one in servers)
    parts = []
    for one in servers:
        rate = arrivals.rate_rps * one.capacity_rps / capacity
        parts.append(ServedPart(rate, queueing.sojourn(Arrivals(rate, arrivals.scv), one)))
    return PoolSojourn(mix_parts(parts), tuple(parts))


def mix_parts(parts: Sequence[ServedPart]) -> Sojourn:
    """Return the distribution over the requests of all parts."""
    if len(parts) == 1:
        return parts[0].sojourn
    total = math.fsum(part.rate_rps for part in parts)
    weights = [part.rate_rps / total if total else 1.0 / len(parts) for part in parts]
    laws = [part.sojourn for part in parts]
    return Sojourn(
        math.fsum(weight * law.utilization for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_batch for weight, law in zip(weights, laws, strict=True)),
        math.fsum(weight * law.mean_ms for weight, law in zip(weights, laws, strict=True)),
        tuple((p, _quantile(p, weights, laws)) for p in _PROBABILITIES),
    )


def _quantile(probability: float, weights: Sequence[float], laws: Sequence[Sojourn]) -> float:
    own = [law.percentile(100.0 * probability) for law in laws]
    low, high = min(own), max(own)
    while math.isfinite(high) and high - low > 1e-6 * high:
        middle = (low + high) / 2.0
        within = math.fsum(weight * law.fraction_within(middle) for weight, law in zip(weights, laws, strict=True))
        low, high = (low, middle) if within >= probability else (middle, high)
    return high
