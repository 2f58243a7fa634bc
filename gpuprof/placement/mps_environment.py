"""What a CUDA process of a replica reads before it starts, for servers that are not gpuprof's."""

from __future__ import annotations

from gpuprof.domain.deployment import Gpu, Node, Partition, Replica
from gpuprof.placement.bundle import is_cpu, slug


def replica_environment(node: Node, gpu: Gpu, partition: Partition, replica: Replica) -> dict[str, str]:
    """Return the environment of a replica's process: its GPU, its MPS daemon and its share; empty on a CPU."""
    if is_cpu(gpu):
        return {}
    slot = "" if partition.mig is None else f"-slot{partition.mig.start}"
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu.index)} if partition.mig is None else {}
    environment["CUDA_MPS_PIPE_DIRECTORY"] = f"/tmp/nvidia-mps-{slug(node.name)}-gpu{gpu.index}{slot}"
    environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{replica.sm_share_pct:g}"
    if replica.memory_limit_bytes:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-replica.memory_limit_bytes // 2**20)}M"
    return environment
