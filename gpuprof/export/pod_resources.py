"""Resource requests of a node's pod: devices, CPU time and memory.

A map has the utilisation of each worker process and, for models measured on a CPU, their host memory. The other
figures are assumptions, and marked so in the texts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuprof.domain.deployment import Gpu, Node, Replica
from gpuprof.domain.plural import count_of
from gpuprof.export.bundle import is_cpu

_GIB = 2**30
#: Router and machine process: an assumption.
_SERVER_CORES = 1.0
#: Memory of router, machine process and their imports, and of tensors in flight, for which ``serve --buffer-mb``
#: allows 1 GiB: assumptions.
_SERVER_BYTES, _BUFFER_BYTES = _GIB // 4, _GIB
#: Memory of a worker process without its model, an assumption; on a GPU it holds the runtime's libraries and CUDA's
#: context.
_CPU_PROCESS_BYTES, _GPU_PROCESS_BYTES = _GIB // 16, 2 * _GIB
#: Memory of a model over the size of its file, where only this size is known: weights, and as much for activations.
_FILE_FACTOR = 2
#: Memory limit over the request, where limits are required: a limit that is too low would kill the process.
_LIMIT_FACTOR = 2


@dataclass(frozen=True, slots=True)
class PodResources:
    """The resource requests of a pod."""

    cores: float
    memory_bytes: int
    cpu_limit: int | None  #: Cores that the map divides; None for a map of GPUs only.
    most_cores: int  #: Maximum number of cores busy at once.
    cores_from: str  #: Source of ``cores``.
    memory_from: str  #: Source of ``memory_bytes``.

    def requirements(self, devices: Mapping[str, str], limited: bool = False) -> dict[str, Any]:
        """Return the resources of a container, as texts, which Kubernetes keeps as they are.

        ``devices``: limits of devices by resource name; ``limited``: whether processor and memory need limits, since
        something would set others.
        """
        limits = dict(devices)
        if self.cpu_limit is not None or limited:
            limits["cpu"] = str(self.cpu_limit or self.most_cores)
        if limited:
            limits["memory"] = _format_mebibytes(_LIMIT_FACTOR * self.memory_bytes)
        return {"requests": {"cpu": self.cpu, "memory": self.memory}, "limits": dict(sorted(limits.items()))}

    @property
    def cpu(self) -> str:
        """CPU time in the notation of Kubernetes."""
        return f"{math.ceil(10 * self.cores - 1e-9) * 100}m" if self.cores % 1 else f"{self.cores:.0f}"

    @property
    def memory(self) -> str:
        """Memory in the notation of Kubernetes."""
        return _format_mebibytes(self.memory_bytes)


def ask_machine(node: Node, file_bytes: Mapping[str, int]) -> PodResources:
    """Return the resource requests of a node's pod. ``file_bytes``: size of the existing files of each model."""
    cores = sum(int(match[1]) for gpu in node.gpus if (match := re.fullmatch(r"cpu-.*?(\d+)c", gpu.device)))
    replicas = [(gpu, replica) for gpu in node.gpus for part in gpu.partitions for replica in part.replicas]
    processes = sum(replica.processes for _, replica in replicas)
    # A thread that waits for a GPU does so awake, in CUDA's default: its core is busy for as long as the batch runs.
    busy = math.fsum(min(1.0, _busy_part(replica)) * replica.processes for _, replica in replicas)
    memory, memory_from = _ask_memory(replicas, file_bytes)
    return PodResources(
        cores=float(cores) or _SERVER_CORES + busy,
        memory_bytes=memory,
        cpu_limit=cores or None,
        most_cores=cores or math.ceil(2 * _SERVER_CORES) + processes,
        cores_from="the cores that the map divides"
        if cores
        else f"{_SERVER_CORES:g} core for the router (assumed), {busy:.2g} for {count_of(processes, 'worker process')} "
        "(busy as the map plans; that each takes a core while a batch runs is assumed)",
        memory_from=memory_from,
    )


def _busy_part(replica: Replica) -> float:
    """Return the busy part of the time of a replica's processes; 1 where unknown."""
    return 1.0 if replica.predicted.utilization is None else replica.predicted.utilization


def _ask_memory(placed: list[tuple[Gpu, Replica]], file_bytes: Mapping[str, int]) -> tuple[int, str]:
    """Return the host memory for all processes, and the source of this figure."""
    models: Counter[str] = Counter()
    processes = 0
    for gpu, replica in placed:
        processes += replica.processes * (_CPU_PROCESS_BYTES if is_host(gpu) else _GPU_PROCESS_BYTES)
        size, source = _find_model_bytes(gpu, replica, file_bytes)
        models[source] += size
    server = _SERVER_BYTES + _BUFFER_BYTES
    texts = [
        f"{_format_gib(server)} for router and buffers (assumed)",
        f"{_format_gib(processes)} for worker processes (assumed)",
    ]
    texts += [f"{_format_gib(size)} for models ({source})" for source, size in models.items() if size]
    return server + processes + models.total(), ", ".join(texts)


def _find_model_bytes(gpu: Gpu, replica: Replica, file_bytes: Mapping[str, int]) -> tuple[int, str]:
    """Return the host memory of a replica's model in all its processes, and the source of this figure."""
    memory_bytes, size = replica.predicted.memory_bytes, file_bytes.get(replica.model)
    if is_cpu(gpu) and memory_bytes is not None:
        return memory_bytes, "predicted" if replica.memory_limit_bytes is None else "measured"
    if size is not None:  # on a GPU, weights pass through the host's memory while they are loaded
        return (_FILE_FACTOR if is_cpu(gpu) else 1) * size * replica.processes, "assumed from their files"
    return (0 if is_host(gpu) else memory_bytes or 0), "assumed to be as much as on the GPU"


def is_host(gpu: Gpu) -> bool:
    """Return whether processes run on the machine's processor, or only sleep in place of a GPU."""
    return is_cpu(gpu) or gpu.device.startswith("sim:")


def list_device_names(gpu: Gpu) -> Iterator[str]:
    """Yield the resource names of the GPU or its used MIG instances in the device plugin; none for a CPU."""
    if is_host(gpu):
        return
    instances = [part.mig.profile for part in gpu.partitions if part.mig is not None and part.replicas]
    yield from (f"nvidia.com/mig-{profile.replace('+', '.')}" for profile in instances)
    if not instances:
        yield "nvidia.com/gpu"


def _format_gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"


def _format_mebibytes(count: int) -> str:
    return f"{-(-count // 2**20)}Mi"
