"""Rewrites the replicas of a map, so that it is simulated with times that its policy did not know."""

from __future__ import annotations

from collections.abc import Callable

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica


def rewritten(deployment: DeploymentMap, change: Callable[[Gpu, Partition, Replica], Replica]) -> DeploymentMap:
    """Return the map with each replica as ``change`` gives it, asked in the order of the map."""

    def gpu_of(gpu: Gpu) -> Gpu:
        parts = tuple(
            part.model_copy(update={"replicas": tuple(change(gpu, part, one) for one in part.replicas)})
            for part in gpu.partitions
        )
        return gpu.model_copy(update={"partitions": parts})

    nodes = tuple(
        node.model_copy(update={"gpus": tuple(gpu_of(gpu) for gpu in node.gpus)}) for node in deployment.nodes
    )
    return deployment.model_copy(update={"nodes": nodes})
