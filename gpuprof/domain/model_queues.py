"""Queueing models under arrivals of one shape for all models, or of each model its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, Sojourn
from gpuprof.errors import InputError


@dataclass(frozen=True, slots=True)
class ShapedQueue:
    """A queueing model that replaces Poisson arrivals by arrivals of a given shape."""

    queueing: QueueModel
    #: At any rate: asked for another, it is played faster or slower (`gpuprof.domain.arrival_process.scale_to_rate`).
    shape: ArrivalProcess

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in one replica: what a map is judged by."""
        return self.pool(arrivals, (server,)).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas that share the stream."""
        return self.queueing.pool(Arrivals.from_process(self.shape, arrivals.rate_rps), servers, coarse=coarse)


@dataclass(frozen=True, slots=True)
class ModelQueues:
    """A queueing model for each served model, selected by `queue_of`."""

    by_model: Mapping[str, QueueModel]
    #: Answers where no model is named: how busy a replica is does not depend on how requests arrive.
    unnamed: QueueModel

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in one replica of no model in particular."""
        return self.unnamed.sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas of no model in particular."""
        return self.unnamed.pool(arrivals, servers, coarse=coarse)


def queue_of(queueing: QueueModel, model: str) -> QueueModel:
    """Return the queueing model for the replicas of a model.

    Raises `InputError` where models have their own and this one has none.
    """
    if not isinstance(queueing, ModelQueues):
        return queueing
    if model not in queueing.by_model:
        known = ", ".join(sorted(queueing.by_model))
        raise InputError(f"nothing is known of how requests of {model} arrive", f"the trace has those of {known}")
    return queueing.by_model[model]
