"""The default queueing model, imported on first use: plans for part of the SLO never use it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, Sojourn

if TYPE_CHECKING:
    from gpuprof.estimators.queueing.queueing import BatchQueue


class DeferredQueue:
    """Implements `gpuprof.domain.sojourn.QueueModel` by `BatchQueue`, which takes a third of a second to import."""

    is_analytic = True

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system; see `QueueModel.sojourn`."""
        return _import_queue().sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a pool; see `QueueModel.pool`."""
        return _import_queue().pool(arrivals, servers, coarse=coarse)


@cache
def _import_queue() -> BatchQueue:
    from gpuprof.estimators.queueing.queueing import BatchQueue

    return BatchQueue()
