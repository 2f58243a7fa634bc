"""Replicas of a map as servers of the queueing models."""

from __future__ import annotations

from gpuprof.domain.deployment import Replica
from gpuprof.domain.sojourn import BatchServer


def make_planned_server(replica: Replica, overhead_ms: float) -> BatchServer:
    """Return the replica as a server with the map's predicted times, without contention on the host.

    ``overhead_ms``: serving overhead of each request.
    """
    assert replica.batch_latency_ms is not None
    return BatchServer(
        latency_ms=replica.batch_latency_ms,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        processes=replica.processes,
        latency_cv=replica.predicted.latency_cv,
        pause_factor=replica.predicted.pause_factor,
        pause_cv=replica.predicted.pause_cv,
        overhead_ms=overhead_ms,
    )
