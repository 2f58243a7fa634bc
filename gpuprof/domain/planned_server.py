"""A replica of a map as the queueing models see it."""

from __future__ import annotations

from gpuprof.domain.deployment import Replica
from gpuprof.domain.sojourn import BatchServer


def make_planned_server(replica: Replica, overhead_ms: float) -> BatchServer:
    """Return the replica as a queue with the times that the map predicts, as if it had the host to itself.

    ``overhead_ms``: what serving adds to each request.
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
