"""Shares of a GPU by NVIDIA's Multi-Process Service: its daemon, and the environment of its clients.

A client reads its share when creating its CUDA context, so the environment is set before the process starts. A
percentage is a cap, not a reservation. Source: NVIDIA, Multi-Process Service (manual).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import LONGEST_DETAIL, InputError, UnavailableError
from gpuprof.runtime.module_command import ANSWER_S, REACTION_S
from gpuprof.runtime.providers import MPS_PIPE

CONTROL = "nvidia-cuda-mps-control"
LOG = "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE, MEMORY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
DEFAULT_PIPE = "/tmp/nvidia-mps"
#: Time between two attempts to reach a daemon.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """A control daemon of MPS, and the environment that sends clients to it."""

    pipe_directory: str  #: Pipe directory through which clients find the daemon.
    log_directory: str | None = None

    def environment(self, percentage: float | None, memory_limit_bytes: int | None = None) -> dict[str, str]:
        """Return the environment variables for a client, to be set before the client creates its CUDA context.

        Raises `InputError` for an invalid percentage or limit. ``percentage``: percent of the SMs of the GPU (or its
        MIG instance), above 0 to 100; None: no limit; ``memory_limit_bytes``: most device memory the client may
        allocate on its single visible GPU.
        """
        if percentage is not None and not 0.0 < percentage <= 100.0:
            raise InputError(f"an MPS percentage must be above 0 and at most 100 but got {percentage:g}")
        variables = {MPS_PIPE: self.pipe_directory}
        if percentage is not None:
            variables[PERCENTAGE] = f"{percentage:g}"
        if self.log_directory is not None:
            variables[LOG] = self.log_directory
        if memory_limit_bytes is not None:
            if memory_limit_bytes < 2**20:
                raise InputError(f"an MPS memory limit must be at least 1 MiB but got {memory_limit_bytes} bytes")
            # "0" is the ordinal among the client's visible GPUs, of which there is only one.
            variables[MEMORY] = f"0={memory_limit_bytes // 2**20}M"
        return variables


@contextmanager
def mps_daemon(visible: str | None = None, control: str = CONTROL) -> Iterator[MpsDaemon]:
    """Yield a daemon: the user's if it responds, else a new daemon, stopped on exit.

    ``visible``: UUID of the GPU or MIG instance served by a new daemon: each needs its own; ``control``: the control
    program. Raises `UnavailableError`, with the daemon's last output, when there is no such program or the daemon does
    not start.
    """
    if shutil.which(control) is None:
        raise UnavailableError(
            f"{control} is not installed, so that shares of a GPU cannot be enforced",
            "it comes with NVIDIA's driver; MIG instances need none",
        )
    users = os.environ.get(MPS_PIPE, DEFAULT_PIPE)
    if visible is None and _is_responding(control, {MPS_PIPE: users}):
        log = os.environ.get(LOG)
        with _logs_in_errors(log):
            yield MpsDaemon(users, log)
        return
    directory = Path(tempfile.mkdtemp(prefix="gpuprof-mps-"))  # short: a socket's path has 107 characters at most
    try:
        with _logs_in_errors(str(directory / "log")):
            yield from _run_daemon(control, directory, visible)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _logs_in_errors(log: str | None) -> Iterator[None]:
    """Add the end of both logs to errors raised inside: a client's own message rarely gives MPS's reason."""
    try:
        yield
    except UnavailableError as error:
        raise add_log_tails(error, log) from error


def add_log_tails(error: UnavailableError, log: str | None) -> UnavailableError:
    """Return the error with the end of both daemon logs in its fix; unchanged if the logs add nothing.

    ``log``: log directory of the daemon, the value of `LOG` in a client's environment.
    """
    tails = read_log_tails(log)
    if not tails or tails in str(error):
        return error
    return UnavailableError(error.message, f"{f'{error.fix}; ' if error.fix else ''}MPS says: {tails}")


@contextmanager
def adopt_daemon(visible: str, pipe: str, log: str | None, control: str = CONTROL) -> Iterator[MpsDaemon | None]:
    """Yield the daemon that an earlier process started for ``visible``, and stop it on exit; None: already gone.

    ``visible``: UUID of the GPU or MIG instance; ``pipe`` and ``log``: directories of the daemon, as in `MpsDaemon`.
    """
    environment = {MPS_PIPE: pipe, "CUDA_VISIBLE_DEVICES": visible} | ({} if log is None else {LOG: log})
    lives = shutil.which(control) is not None and _is_responding(control, environment)
    try:
        yield MpsDaemon(pipe, log) if lives else None
    finally:
        if lives:
            _send_command(control, environment, "quit")
        shutil.rmtree(Path(pipe).parent, ignore_errors=True)


def _run_daemon(control: str, directory: Path, visible: str | None) -> Iterator[MpsDaemon]:
    pipe, log = directory / "pipe", directory / "log"
    pipe.mkdir()
    log.mkdir()
    environment = {MPS_PIPE: str(pipe), LOG: str(log)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    try:
        _start(control, environment, log)
        yield MpsDaemon(str(pipe), str(log))
    finally:
        _send_command(control, environment, "quit")


def _start(control: str, environment: Mapping[str, str], log: Path) -> None:
    try:
        # Output goes into a file: the daemon would inherit a pipe and keep it open, blocking the reader.
        with (log / "start.log").open("wb") as output:
            process = subprocess.run(
                [control, "-d"],
                env=_merge_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=ANSWER_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the MPS daemon does not start: {error}") from error
    end = time.monotonic() + REACTION_S
    while not (answers := _is_responding(control, environment)) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    if process.returncode or not answers:
        reason = read_log_tails(log) or f"exit code {process.returncode}"
        raise UnavailableError(f"the MPS daemon does not start: {reason}", "does nvidia-smi work here?")


def read_log_tails(directory: Path | str | None) -> str:
    """Return the ends of the logs in a daemon's log directory, on a single line: ``control.log: …; server.log: …``."""
    tails = []
    for path in sorted(Path(directory).glob("*.log")) if directory is not None else ():
        try:
            text = " ".join(path.read_text(errors="replace").split())
        except OSError:
            continue
        if text:
            tails.append(f"{path.name}: {text[-LONGEST_DETAIL:]}")
    return "; ".join(tails)


def _is_responding(control: str, environment: Mapping[str, str]) -> bool:
    return _send_command(control, environment, "get_server_list") == 0


def _send_command(control: str, environment: Mapping[str, str], command: str) -> int:
    """Return the control program's exit code for ``command``; not 0 when the daemon is gone."""
    try:
        return subprocess.run(
            [control],
            input=f"{command}\n".encode(),
            env=_merge_environment(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ANSWER_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def _merge_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``environment``; this process's own share must not reach the daemon."""
    inherited = {name: value for name, value in os.environ.items() if name not in (PERCENTAGE, MEMORY)}
    return {**inherited, **environment}
