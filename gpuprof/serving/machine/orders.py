"""Messages between router and machines: cores and GPUs of a machine, and orders for machines and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuprof.machine.cgroup import own_cores
from gpuprof.machine.gpu import LocalGpu, LocalMigInstance, list_local_gpus
from gpuprof.machine.mps import MpsDaemon


@dataclass(frozen=True, slots=True)
class MachineParts:
    """Cores available to processes of a machine, and its GPUs with their MIG instances."""

    cores: tuple[int, ...]
    gpus: tuple[LocalGpu, ...] = ()

    @classmethod
    def here(cls) -> MachineParts:
        """Return the parts of this machine."""
        return cls(own_cores(), list_local_gpus())

    def to_message(self) -> dict[str, Any]:
        """Return the cores and GPUs as JSON for the wire."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> MachineParts:
        """Return the cores and GPUs written by `to_message`."""
        gpus = (
            LocalGpu(
                gpu["index"], gpu["device"], gpu["uuid"], tuple(LocalMigInstance(**mig) for mig in gpu["instances"])
            )
            for gpu in message["gpus"]
        )
        return cls(tuple(message["cores"]), tuple(gpus))


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The part of a GPU or MIG instance that a worker process may use."""

    uuid: str  #: ``GPU-…`` or ``MIG-…``.
    #: Percentage of its compute units, in (0, 100]; None: no limit, like all processes on it.
    active_pct: float | None
    memory_bytes: int | None = None  #: Limit of its memory.

    def environment(self, daemon: MpsDaemon | None) -> dict[str, str]:
        """Return the environment variables for the start of the process; ``daemon`` is None for shares without MPS."""
        variables = {"CUDA_VISIBLE_DEVICES": self.uuid}
        return variables if daemon is None else variables | daemon.environment(self.active_pct, self.memory_bytes)


def needs_mps(shares_pct: list[float]) -> bool:
    """Return whether the processes of a GPU or MIG instance need MPS: several, or one with less than 100%."""
    return len(shares_pct) > 1 or any(share < 100.0 for share in shares_pct)


#: Fields of an order that the machine uses itself and does not send to the worker.
_KEPT = ("gpu", "with_mps", "latency_ms", "latency_cv", "node", "turns", "mates")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """The model of a worker, and its resources."""

    model: str
    version: str
    path: str
    batch: int  #: Largest batch.
    threads: int = 1  #: Threads of ONNX Runtime within an operator.
    provider: str = "CPUExecutionProvider"  #: Execution provider.
    cores: tuple[int, ...] = ()  #: Cores of the worker; empty: any.
    quota_cores: float | None = None  #: Limit in CPU seconds per second of all workers of ``group`` together.
    group: str = ""  #: Name of the control group for the quota.
    turns: str = ""  #: Name of the process that serves several models, one batch at a time; empty: this model alone.
    mates: int = 1  #: Number of models of the process.
    gpu: GpuShare | None = None  #: Share of a GPU.
    with_mps: bool = False  #: True if the share needs MPS.
    #: ``latency_ms``, ``latency_cv``: Predicted times of a batch of 1, 2, … and their variation, for simulated workers.
    latency_ms: tuple[float, ...] = ()
    latency_cv: float = 0.0
    node: str = ""  #: The worker's machine, by its name in the map.
    sha256: str = ""  #: Hash of the planned model file; empty: no check.

    def to_message(self) -> dict[str, object]:
        """Return the worker's part of the order, as JSON for the wire."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in _KEPT}

    def to_machine(self) -> dict[str, Any]:
        """Return the whole order as JSON for the wire."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> WorkerOrder:
        """Return the order written by `to_machine`."""
        gpu = message["gpu"]
        fields: dict[str, Any] = {**message, "gpu": None if gpu is None else GpuShare(**gpu)}
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The inherited arena: file descriptor and size."""

    fd: int
    size: int
