"""Merged replicas in the simulator: models that share a queue are simulated as a single model.

A merged replica takes the oldest requests of all its models, so the common queue is the server's. The requests' models
are lost, so the tightest objective applies to all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, Partition, Replica
from gpuprof.errors import InputError
from gpuprof.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class MergedQueues:
    """A map with a single model in place of each merge."""

    deployment: DeploymentMap  #: The map without merges.
    queue_of: Mapping[str, str]  #: Merged model → model in its place; empty for maps without merges.

    def rates(self, original: DeploymentMap, rates: Mapping[str, float]) -> dict[str, float]:
        """Return rates by queue; merged models without a rate in ``rates`` keep the map's."""
        by_queue = {name: rate for name, rate in rates.items() if name not in self.queue_of}
        for queue in {self.queue_of[name] for name in rates if name in self.queue_of}:
            members = [name for name, other in self.queue_of.items() if other == queue]
            by_queue[queue] = sum(rates.get(name, original.models[name].rate_rps) for name in members)
        return by_queue

    def trace(self, recorded: Trace) -> Trace:
        """Return the requests of a trace by queue."""
        times = {name: own for name, own in recorded.times.items() if name not in self.queue_of}
        for queue in {self.queue_of[name] for name in recorded.times if name in self.queue_of}:
            own = [recorded.times[name] for name, other in self.queue_of.items() if other == queue]
            times[queue] = np.sort(np.concatenate([arrivals for arrivals in own if len(arrivals)] or own))
        return Trace(times, recorded.duration_s)


def merged_queues(deployment: DeploymentMap) -> MergedQueues:
    """Return the map with a single model for each merge.

    Raises `InputError` when a merged model has other replicas too: routing between them depends on the requests'
    models, which the common queue loses.
    """
    queue_of = {name: merge for merge, told in deployment.merges.items() for name in told.members}
    for *_, replica in deployment.places():
        for model in replica.rates():
            if queue_of.get(model, replica.model) != replica.model:
                raise InputError(
                    f"{model} is served by the merge {queue_of[model]} and by {replica.model}, which is not simulated",
                    "place without --merge",
                )
    if not queue_of:
        return MergedQueues(deployment, {})
    models = {name: model for name, model in deployment.models.items() if name not in queue_of}
    for merge, told in deployment.merges.items():
        models[merge] = _join_models([deployment.models[name] for name in told.members])
    nodes = tuple(
        node.model_copy(update={"gpus": tuple(_replace_replicas(gpu) for gpu in node.gpus)})
        for node in deployment.nodes
    )
    return MergedQueues(deployment.model_copy(update={"models": models, "nodes": nodes, "merges": {}}), queue_of)


def _join_models(members: list[DeployedModel]) -> DeployedModel:
    return DeployedModel(
        rate_rps=sum(model.rate_rps for model in members),
        slo_ms=min(model.slo_ms for model in members),
        percentile=max(model.percentile for model in members),
    )


def _replace_replicas(gpu: Gpu) -> Gpu:
    partitions = tuple(
        Partition(mig=partition.mig, replicas=tuple(_make_plain_replica(replica) for replica in partition.replicas))
        for partition in gpu.partitions
    )
    return gpu.model_copy(update={"partitions": partitions})


def _make_plain_replica(replica: Replica) -> Replica:
    return replica.model_copy(update={"merged": ()})
