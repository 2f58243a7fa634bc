"""The order for a worker, and how its process is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuprof.runtime.module_command import module_command
from gpuprof.serving.machine.mps import GpuShare
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.watch.supervised_process import LivingProcess

#: Fields of an order that the machine uses itself and does not send to the worker.
_KEPT = ("environment", "gpu", "with_mps", "latency_ms", "latency_cv", "node", "turns", "mates")


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
    #: Set before the process starts: MPS and MIG are bound so.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Share of a GPU; becomes part of ``environment`` when the GPU's MPS daemon runs.
    gpu: GpuShare | None = None
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
        """Return the order described by `to_machine`."""
        gpu = message["gpu"]
        fields: dict[str, Any] = {**message, "gpu": None if gpu is None else GpuShare(**gpu)}
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The inherited arena: file descriptor and size."""

    fd: int
    size: int


def start_worker(
    numbers: Sequence[str], order: WorkerOrder, key: RendezvousKey, memory: SharedMemory | None
) -> LivingProcess:
    """Start a worker. Raises `OSError` when no process can be started.

    Parameters
    ----------
    numbers : sequence of str
        The numbers of the worker's models in the router.
    order : WorkerOrder
        The order of any of the models, which all have the worker's share.
    key : RendezvousKey
        Address and secret of the router's rendezvous.
    memory : SharedMemory or None
        Memory shared with the router; None: tensors travel with the messages.
    """
    arena = SharedMemory(-1, 0) if memory is None else memory
    command = module_command("gpuprof.serving.worker.worker", str(arena.fd), str(arena.size), *numbers)
    process = subprocess.Popen(
        command,
        pass_fds=() if memory is None else (memory.fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # NumPy's own threads would come on top of ONNX Runtime's.
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(order.threads),
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            **order.environment,
        },
    )
    assert process.stdin is not None
    with process.stdin as pipe:  # not among its arguments, which all users can read
        pipe.write(key.to_json().encode())
    return LivingProcess(process.pid, process)
