"""Shares of a GPU through MPS: a control daemon for each GPU or MIG instance, and the environment of its clients.

CUDA reads these variables when a process makes its context, so they must be set before the worker starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import UnavailableError

CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What one worker process may use of a GPU or a MIG instance.

    Attributes
    ----------
    uuid : str
        ``GPU-…`` or ``MIG-…``.
    active_pct : float
        Of its compute units, in (0, 100].
    memory_bytes : int or None
        Limit of its memory.
    """

    uuid: str
    active_pct: float
    memory_bytes: int | None = None

    def environment(self, pipes: Path | None) -> dict[str, str]:
        """Return what to set before the process starts; ``pipes`` is the daemon's directory, None without MPS."""
        variables = {"CUDA_VISIBLE_DEVICES": self.uuid}
        if pipes is None:
            return variables
        variables |= _directories(pipes)
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self.active_pct:g}"
        if self.memory_bytes is not None:
            # The only device that the process sees is number 0.
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-self.memory_bytes // _MEBIBYTE)}M"
        return variables


class MpsDaemon:
    """The control daemon of one GPU or MIG instance, with pipes and logs in a directory of its own.

    A daemon that was there before, with the default directories, is left alone.

    Parameters
    ----------
    uuid : str
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.pipes: Path | None = None

    def start(self) -> Path:
        """Start the daemon and return its directory.

        Raises
        ------
        UnavailableError
            When there is no MPS here, or it does not start.
        """
        if shutil.which(CONTROL) is None:
            raise UnavailableError(
                f"cannot hold a share of {self._uuid}: {CONTROL} is not installed", "see gpuprof doctor"
            )
        # Paths of sockets must be short.
        self.pipes = Path(tempfile.mkdtemp(prefix="gpuprof-mps-"))
        self._control(["-d"], "", {"CUDA_VISIBLE_DEVICES": self._uuid})
        self._control([], "get_server_list\n", {})
        return self.pipes

    def stop(self) -> None:
        """End the daemon and remove its directory; no error when it has ended."""
        if self.pipes is None:
            return
        try:
            self._control([], "quit\n", {})
        except UnavailableError:
            pass  # it is gone already
        finally:
            shutil.rmtree(self.pipes, ignore_errors=True)
            self.pipes = None

    def _control(self, options: list[str], said: str, variables: Mapping[str, str]) -> str:
        assert self.pipes is not None
        environment = {**os.environ, **_directories(self.pipes), **variables}
        try:
            done = subprocess.run(
                [CONTROL, *options],
                input=said,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._unavailable(str(error)) from error
        if done.returncode:
            raise self._unavailable(done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
        return done.stdout

    def _unavailable(self, detail: str) -> UnavailableError:
        first = detail.splitlines()[0] if detail else ""
        return UnavailableError(f"MPS does not start for {self._uuid}: {first}", f"see the logs in {self.pipes}")


def needs_mps(shares_pct: list[float]) -> bool:
    """Return whether the processes of one GPU or MIG instance must be held apart: several, or less than all of it."""
    return len(shares_pct) > 1 or any(share < 100.0 for share in shares_pct)


def _directories(pipes: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
