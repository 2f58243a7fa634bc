"""Queueing models with a common arrival shape, or a shape for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.arrival_process import ArrivalProcess
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, Sojourn
from gpuprof.errors import InputError


@dataclass(frozen=True, slots=True)
class ShapedQueue:
    """A queueing model with arrivals of a given shape in place of Poisson arrivals."""

    queueing: QueueModel
    #: Process of any rate, scaled to the rate in question (`gpuprof.domain.arrival_process.scale_to_rate`).
    shape: ArrivalProcess

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in a replica, the criterion for a map."""
        return self.pool(arrivals, (server,)).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas with a common stream."""
        return self.queueing.pool(Arrivals.from_process(self.shape, arrivals.rate_rps), servers, coarse=coarse)


@dataclass(frozen=True, slots=True)
class ModelQueues:
    """A queueing model for each served model, selected by `queue_of`."""

    by_model: Mapping[str, QueueModel]
    #: Model for queries without a model's name: the utilization of a replica does not depend on the arrival process.
    unnamed: QueueModel

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in a replica of an unnamed model."""
        return self.unnamed.sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas of an unnamed model."""
        return self.unnamed.pool(arrivals, servers, coarse=coarse)


def queue_of(queueing: QueueModel, model: str) -> QueueModel:
    """Return the queueing model for the replicas of a model.

    Raises `InputError` where queueing models are defined by model, but not for this model.
    """
    if not isinstance(queueing, ModelQueues):
        return queueing
    if model not in queueing.by_model:
        modelled = ", ".join(sorted(queueing.by_model))
        raise InputError(f"nothing is known of how requests of {model} arrive", f"the trace has those of {modelled}")
    return queueing.by_model[model]
