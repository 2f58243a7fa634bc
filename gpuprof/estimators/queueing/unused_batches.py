"""Leaves out the sizes of batches that never come about, so that the queue of a lightly loaded replica is small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.special import gammainc, gammaincinv

from gpuprof.domain.sojourn import BatchServer

#: Probability, for each batch, of more requests than fit while it runs: what is that rare is left out.
_NEVER = 1e-12


def drop_unused_batches(rate_rps: float, server: BatchServer) -> BatchServer:
    """Return one process under Poisson requests without the sizes of batches above those that it ever takes.

    Where no request waits for a batch to fill, a batch holds what came while the one before it ran. If no more than K
    come while the longest batch of up to K runs, none is larger than K, and how long larger ones would take makes no
    difference. Replicas that differ in those alone have one queue, which is solved once. ``server``: of one process,
    with ``max_wait_ms`` of zero.
    """
    means = np.maximum.accumulate(np.asarray(server.latency_ms[: server.batch], dtype=float))
    slowest = max(1.0, server.pause_factor)
    if server.latency_cv >= 1e-3:
        shape = server.latency_cv**-2
        slowest *= max(1.0, float(gammaincinv(shape, 1.0 - _NEVER)) / shape)
    sizes = np.arange(1, len(means) + 1)
    enough = np.flatnonzero(gammainc(sizes + 1.0, rate_rps / 1000.0 * slowest * means) < _NEVER)
    if not len(enough) or enough[0] + 1 >= server.batch:
        return server
    batch = int(enough[0]) + 1
    return replace(server, batch=batch, latency_ms=server.latency_ms[:batch])
