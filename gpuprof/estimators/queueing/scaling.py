"""Queues in relative times: replicas and distributions scaled to a unit, and distributions as quantile tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpuprof.domain.sojourn import BatchServer, Sojourn

#: Length of the lattice of `batch_chain`, in full batches' times.
LATTICE_SERVICES = 4


def make_overload(load: float, server: BatchServer) -> Sojourn:
    """Return the distribution at or beyond capacity: infinite times."""
    return Sojourn(load, float(server.batch), math.inf, ((0.0, math.inf), (1.0, math.inf)))


def scale_server(server: BatchServer, unit_ms: float) -> BatchServer:
    """Return a replica with times in ``unit_ms``, rounded to five digits for more cache hits, and no overhead."""
    wait = _round(server.max_wait_ms / unit_ms)
    return BatchServer(
        tuple(_round(latency / unit_ms) for latency in server.latency_ms[: server.batch]),
        server.batch,
        wait if wait > 1e-9 else 0.0,
        server.processes,
        round(server.latency_cv, 4),
        _round(server.pause_factor),
        round(server.latency_cv if server.pause_cv is None else server.pause_cv, 4),
    )


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def scale_sojourn(law: Sojourn, unit_ms: float, overhead_ms: float) -> Sojourn:
    """Return a distribution in milliseconds, with the overhead added."""
    times = tuple((p, ms * unit_ms + overhead_ms) for p, ms in law.quantiles_ms)
    return Sojourn(law.utilization, law.mean_batch, law.mean_ms * unit_ms + overhead_ms, times)


def pair_quantiles(probabilities: Iterable[float], times: Iterable[float]) -> tuple[tuple[float, float], ...]:
    """Return the table of quantiles from probability 0 to 1."""
    table = [(float(p), float(ms)) for p, ms in zip(probabilities, times, strict=True)]
    last = next((number for number, (p, _) in enumerate(table) if p >= 0.99999), len(table) - 1)
    return ((0.0, table[0][1]), *table[1:last], (max(table[last][0], 0.99999), table[last][1]))
