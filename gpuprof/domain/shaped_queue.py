"""A queueing model under arrivals of one shape, whatever the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, Sojourn


@dataclass(frozen=True, slots=True)
class ShapedQueue:
    """Answers for arrivals of the given shape where it is asked for Poisson ones.

    Attributes
    ----------
    queueing : QueueModel
    shape : ArrivalProcess
        At any rate: asked for another, it is played faster or slower (`gpuprof.domain.arrival_process.at_rate`).
    """

    queueing: QueueModel
    shape: ArrivalProcess

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system."""
        return self.queueing.sojourn(Arrivals.shaped(self.shape, arrivals.rate_rps), server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas that share the stream."""
        return self.queueing.pool(Arrivals.shaped(self.shape, arrivals.rate_rps), servers, coarse=coarse)
