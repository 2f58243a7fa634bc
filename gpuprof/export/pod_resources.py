"""Resource requests of a node's pod: devices, CPU time and memory.

A map knows how busy each worker process is and, where a model was measured on a CPU, what it holds of the host's
memory. The rest are assumptions, which the texts say of themselves.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuprof.domain.deployment import Gpu, Node, Replica
from gpuprof.domain.plural import count_of
from gpuprof.export.bundle import is_cpu

_GIB = 2**30
#: Router and machine process: an assumption.
_SERVER_CORES = 1.0
#: Router, machine process and what they have imported, and the tensors on their way, of which ``serve --buffer-mb``
#: lets 1 GiB be kept: assumptions.
_SERVER_BYTES, _BUFFER_BYTES = _GIB // 4, _GIB
#: A worker process without its model, an assumption: on a GPU it holds the runtime's libraries and CUDA's context.
_CPU_PROCESS_BYTES, _GPU_PROCESS_BYTES = _GIB // 16, 2 * _GIB
#: Memory of a model of which nothing is known but its file: weights, and as much for what it computes.
_FILE_FACTOR = 2
#: Where limits must be set, so much more memory than is asked for: a limit that is a guess ends what would have run.
_LIMIT_FACTOR = 2


@dataclass(frozen=True, slots=True)
class PodResources:
    """What a pod asks of its machine."""

    cores: float
    memory_bytes: int
    devices: Mapping[str, int]  #: Of the device plugin, by the names of their resources.
    cpu_limit: int | None  #: Cores that the map divides; None where it divides GPUs alone.
    most_cores: int  #: That can be busy at once.
    cores_from: str  #: What ``cores`` rests on.
    memory_from: str  #: What ``memory_bytes`` rests on.

    def requirements(self, limited: bool = False) -> dict[str, dict[str, str]]:
        """Return the resources of a container, as texts, which Kubernetes keeps as they are.

        ``limited``: whether processor and memory need limits, since something would set others.
        """
        limits = {name: str(count) for name, count in self.devices.items()}
        if self.cpu_limit is not None or limited:
            limits["cpu"] = str(self.cpu_limit or self.most_cores)
        if limited:
            limits["memory"] = _format_mebibytes(_LIMIT_FACTOR * self.memory_bytes)
        return {"requests": {"cpu": self.cpu, "memory": self.memory}, "limits": dict(sorted(limits.items()))}

    @property
    def cpu(self) -> str:
        """Processor time as Kubernetes writes it."""
        return f"{math.ceil(10 * self.cores - 1e-9) * 100}m" if self.cores % 1 else f"{self.cores:.0f}"

    @property
    def memory(self) -> str:
        """Memory as Kubernetes writes it."""
        return _format_mebibytes(self.memory_bytes)


def ask_machine(node: Node, file_bytes: Mapping[str, int]) -> PodResources:
    """Return what the pod of a node asks for. ``file_bytes``: size of the files of each model that exists here."""
    cores = sum(int(found[1]) for gpu in node.gpus if (found := re.fullmatch(r"cpu-.*?(\d+)c", gpu.device)))
    placed = [(gpu, replica) for gpu in node.gpus for part in gpu.partitions for replica in part.replicas]
    processes = sum(one.processes for _, one in placed)
    # A thread that waits for a GPU does so awake, in CUDA's default: its core is busy for as long as the batch runs.
    busy = math.fsum(min(1.0, _busy_part(one)) * one.processes for _, one in placed)
    memory, memory_from = _ask_memory(placed, file_bytes)
    return PodResources(
        cores=float(cores) or _SERVER_CORES + busy,
        memory_bytes=memory,
        devices=_count_devices(node),
        cpu_limit=cores or None,
        most_cores=cores or math.ceil(2 * _SERVER_CORES) + processes,
        cores_from="the cores that the map divides"
        if cores
        else f"{_SERVER_CORES:g} core for the router (assumed), {busy:.2g} for {count_of(processes, 'worker process')} "
        "(busy as the map plans; that each takes a core while a batch runs is assumed)",
        memory_from=memory_from,
    )


def _busy_part(replica: Replica) -> float:
    """Return the part of the time for which the processes of a replica are busy; all of it where unknown."""
    return 1.0 if replica.predicted.utilization is None else replica.predicted.utilization


def _ask_memory(placed: list[tuple[Gpu, Replica]], file_bytes: Mapping[str, int]) -> tuple[int, str]:
    """Return the host's memory that all processes need, and what that rests on."""
    models: Counter[str] = Counter()
    processes = 0
    for gpu, replica in placed:
        processes += replica.processes * (_CPU_PROCESS_BYTES if _is_host(gpu) else _GPU_PROCESS_BYTES)
        held, source = _find_model_bytes(gpu, replica, file_bytes)
        models[source] += held
    server = _SERVER_BYTES + _BUFFER_BYTES
    texts = [
        f"{_format_gib(server)} for router and buffers (assumed)",
        f"{_format_gib(processes)} for worker processes (assumed)",
    ]
    texts += [f"{_format_gib(held)} for models ({source})" for source, held in models.items() if held]
    return server + processes + models.total(), ", ".join(texts)


def _find_model_bytes(gpu: Gpu, replica: Replica, file_bytes: Mapping[str, int]) -> tuple[int, str]:
    """Return the host's memory of a replica's model in all its processes, and where that is known from."""
    known, size = replica.predicted.memory_bytes, file_bytes.get(replica.model)
    if is_cpu(gpu) and known is not None:
        return known, "predicted" if replica.memory_limit_bytes is None else "measured"
    if size is not None:  # on a GPU, weights pass through the host's memory while they are loaded
        return (_FILE_FACTOR if is_cpu(gpu) else 1) * size * replica.processes, "assumed from their files"
    return (0 if _is_host(gpu) else known or 0), "assumed to be as much as on the GPU"


def _is_host(gpu: Gpu) -> bool:
    """Return whether processes run on the machine's processor, or only sleep in place of a GPU."""
    return is_cpu(gpu) or gpu.device.startswith("sim:")


def _count_devices(node: Node) -> dict[str, int]:
    """Return the devices of the node as the device plugin offers them; a plus is none of a resource's letters."""
    wanted: Counter[str] = Counter()
    for gpu in node.gpus:
        wanted.update(() if _is_host(gpu) else _list_device_names(gpu))
    return dict(sorted(wanted.items()))


def _list_device_names(gpu: Gpu) -> Iterator[str]:
    instances = [part.mig.profile for part in gpu.partitions if part.mig is not None and part.replicas]
    yield from (f"nvidia.com/mig-{profile.replace('+', '.')}" for profile in instances)
    if not instances:
        yield "nvidia.com/gpu"


def _format_gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"


def _format_mebibytes(count: int) -> str:
    return f"{-(-count // 2**20)}Mi"
