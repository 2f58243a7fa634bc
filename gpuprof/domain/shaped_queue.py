"""A queueing model under arrivals of one shape, whatever the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, Sojourn


@dataclass(frozen=True, slots=True)
class ShapedQueue:
    """Answers for arrivals of the given shape where it is asked for Poisson ones."""

    queueing: QueueModel
    #: At any rate: asked for another, it is played faster or slower (`gpuprof.domain.arrival_process.at_rate`).
    shape: ArrivalProcess

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return about the distribution of the time in one replica; `pool` of it alone is exact.

        A replica's own part of a stream is what searches ask for, and few shapes keep theirs when they are split.
        """
        return self.pool(arrivals, (server,), coarse=True).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas that share the stream."""
        return self.queueing.pool(Arrivals.from_process(self.shape, arrivals.rate_rps), servers, coarse=coarse)
