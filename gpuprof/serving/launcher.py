"""Starts worker processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpuprof.serving.arena import Arena
from gpuprof.serving.mps import GpuShare

_PATIENCE_S = 5.0
#: What of an order the worker is not told: it is started with it.
_KEPT = ("environment", "gpu", "with_mps", "latency_ms", "latency_cv")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a worker is to serve and with what.

    Attributes
    ----------
    model, version, path : str
    batch : int
        Largest batch.
    threads : int
        Of ONNX Runtime within an operator.
    provider : str
        Execution provider.
    cores : tuple of int
        It runs on these; empty: it is not held to any.
    quota_cores : float or None
        CPU seconds a second that all workers of ``group`` may take together.
    group : str
        Name of the control group for the quota.
    environment : mapping of str to str
        Set before the process starts: MPS and MIG are bound so.
    gpu : GpuShare or None
        Part of a GPU that it is to be held to; becomes ``environment`` when the GPU's MPS daemon runs.
    with_mps : bool
        Whether that needs MPS.
    latency_ms, latency_cv : tuple of float, float
        Predicted times of a batch of 1, 2, … and their variation: what a simulated worker takes.
    """

    model: str
    version: str
    path: str
    batch: int
    threads: int = 1
    provider: str = "CPUExecutionProvider"
    cores: tuple[int, ...] = ()
    quota_cores: float | None = None
    group: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: GpuShare | None = None
    with_mps: bool = False
    latency_ms: tuple[float, ...] = ()
    latency_cv: float = 0.0

    def to_message(self) -> dict[str, object]:
        """Return the order as JSON for the wire."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in _KEPT}


class WorkerProcess(Protocol):
    """A worker that was started."""

    pid: int

    def kill(self) -> None:
        """End it at once; no error when it has ended."""
        ...

    def reap(self) -> None:
        """Wait for its end."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    def launch(self, order: WorkerOrder) -> tuple[WorkerProcess, socket.socket]:
        """Start a worker and return it with the router's end of its socket.

        Raises
        ------
        OSError
            When no process can be started.
        """
        ...


class LocalProcess:
    """A worker that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def reap(self) -> None:
        """Wait for its end, which is helped along after a while, and collect its exit status."""
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalLauncher:
    """Starts workers as children of this process, with the arena mapped.

    Parameters
    ----------
    arena : Arena
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def launch(self, order: WorkerOrder) -> tuple[WorkerProcess, socket.socket]:
        """Start a worker in a fresh interpreter."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gpuprof.serving.worker", str(theirs.fileno())]
        command += [str(self._arena.fd), str(self._arena.capacity)]
        # NumPy's own threads would come on top of ONNX Runtime's.
        threads = {"OMP_NUM_THREADS": str(order.threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self._arena.fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **threads, **order.environment},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return LocalProcess(process), ours
