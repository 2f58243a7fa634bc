"""The order for a worker, and how its process is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuprof.runtime.module_command import module_command
from gpuprof.serving.machine.mps import GpuShare
from gpuprof.serving.transport.rendezvous import RendezvousKey

#: What of an order the worker is not told: it is started with it.
_KEPT = ("environment", "gpu", "with_mps", "latency_ms", "latency_cv", "node")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """The model that a worker serves, and its resources."""

    model: str
    version: str
    path: str
    batch: int  #: Largest batch.
    threads: int = 1  #: Of ONNX Runtime within an operator.
    provider: str = "CPUExecutionProvider"  #: Execution provider.
    cores: tuple[int, ...] = ()  #: It runs on these; empty: it is not held to any.
    quota_cores: float | None = None  #: CPU seconds a second that all workers of ``group`` may take together.
    group: str = ""  #: Name of the control group for the quota.
    turns: str = ""  #: Workers with one name here run one batch at a time; empty: it runs whenever it has one.
    #: Set before the process starts: MPS and MIG are bound so.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Part of a GPU that it is to be held to; becomes ``environment`` when the GPU's MPS daemon runs.
    gpu: GpuShare | None = None
    with_mps: bool = False  #: Whether that needs MPS.
    #: ``latency_ms``, ``latency_cv``: Predicted times of a batch of 1, 2, … and their variation: what a simulated
    #: worker takes.
    latency_ms: tuple[float, ...] = ()
    latency_cv: float = 0.0
    node: str = ""  #: The machine that keeps it, by its name in the map.
    sha256: str = ""  #: Of the model's file as it was planned with; empty: any will do.

    def to_message(self) -> dict[str, object]:
        """Return the worker's part of the order, as JSON for the wire."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in _KEPT}

    def to_machine(self) -> dict[str, Any]:
        """Return the whole order as JSON for the wire."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> WorkerOrder:
        """Return the order that `to_machine` described."""
        gpu = message["gpu"]
        known: dict[str, Any] = {**message, "gpu": None if gpu is None else GpuShare(**gpu)}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The arena as processes inherit it: file descriptor and size."""

    fd: int
    size: int


def start_worker(
    number: str, order: WorkerOrder, key: RendezvousKey, memory: SharedMemory | None
) -> subprocess.Popen[bytes]:
    """Start a worker in a fresh interpreter; where nothing forbids a fork, `ForkServerLink` is quicker.

    Raises `OSError` when no process can be started.

    Parameters
    ----------
    number : str
        Under which the router waits for it.
    key : RendezvousKey
        Where it finds the router.
    memory : SharedMemory or None
        What it shares with the router; None: its tensors travel with the messages.
    """
    command = module_command("gpuprof.serving.worker.worker", number)
    command += [] if memory is None else [str(memory.fd), str(memory.size)]
    process = subprocess.Popen(
        command,
        pass_fds=() if memory is None else (memory.fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **thread_environment(order), **order.environment},
    )
    assert process.stdin is not None
    with process.stdin as pipe:  # not among its arguments, which everybody can read
        pipe.write(key.to_json().encode())
    return process


def thread_environment(order: WorkerOrder) -> dict[str, str]:
    """Return what keeps a worker's libraries to its threads: NumPy's own would come on top of ONNX Runtime's."""
    return {"OMP_NUM_THREADS": str(order.threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
