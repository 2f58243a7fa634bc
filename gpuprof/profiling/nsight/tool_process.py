"""Finds a profiler, queries its version, and runs it to its end, or kills it with all its child processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.runtime.child_process import PATIENCE_S
from gpuprof.runtime.module_command import REACTION_S

_VERSION = re.compile(r"(?:^|[Vv]ersion )(\d{4}\.\d+(?:\.\d+)*)", re.MULTILINE)
#: Paths of NVIDIA's packages outside the PATH.
_PLACES = {
    "ncu": ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu"),
    "nsys": ("opt/nvidia/nsight-systems*/*/bin/nsys", "usr/local/cuda*/bin/nsys"),
}


def find_tool(name: str) -> Path | None:
    """Return a program's path: on the PATH, beside this Python, or among NVIDIA's packages; None if missing."""
    program = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if program is not None:
        return Path(program)
    places = _PLACES.get(name, ())
    return next((path for place in places for path in sorted(Path("/").glob(place), reverse=True)), None)


def tool_version(binary: Path) -> str | None:
    """Return ``"2024.6.1"``; None when the program does not run, or prints no version."""
    output = ask_tool([str(binary), "--version"])
    match = _VERSION.search(output or "")
    return match[1] if match else None


def ask_tool(command: Sequence[str], time_limit_s: float = PATIENCE_S) -> str | None:
    """Return the output of a tool; None when the tool cannot be started, fails or does not end in time."""
    try:
        return run_tool(command, time_limit_s=time_limit_s, keep_log=False)
    except UnavailableError:
        return None


def run_tool(
    command: Sequence[str],
    *,
    time_limit_s: float = PATIENCE_S,
    environment: Mapping[str, str] | None = None,
    explain: Callable[[str], GpuprofError | None] = lambda output: None,
    keep_log: bool = True,
) -> str:
    """Run ``command`` in its own process group and return its interleaved standard output and standard error.

    The call returns only after the whole group has ended; otherwise a profiler's child could outlive the profiler. The
    group of a tool that hangs, dies or leaves processes behind is ended: SIGTERM first, then SIGKILL. Raises
    `UnavailableError`, with the tool's last output, when the tool cannot be started, fails or takes too long.

    Parameters
    ----------
    time_limit_s : float
        Time after which the tool is considered hung.
    environment : mapping of str to str, optional
        Variables added to this process's own.
    explain : function
        Output → an error with a fix for the user, or None.
    keep_log : bool
        Keep a failed tool's whole output, and name the file in the error.
    """
    tool = Path(command[0]).name
    handle, name = tempfile.mkstemp(prefix=f"gpuprof-{tool}-", suffix=".log")
    os.close(handle)
    log, is_kept = Path(name), False
    try:
        # LC_ALL=C, since numbers and messages are parsed.
        code = _exit_code(command, log, time_limit_s, {**os.environ, "LC_ALL": "C", **(environment or {})})
        output = log.read_text(encoding="utf-8", errors="replace")
        if code == 0:
            return output
        if code is not None and (explanation := explain(output)) is not None:
            raise explanation
        is_kept = keep_log
    finally:
        if not is_kept:
            log.unlink(missing_ok=True)
    fix = f"log: {log}" if keep_log else ""
    if code is None:
        fix += "; --profiler-limit gives it longer" if keep_log else ""
        what = f"did not end within {time_limit_s:g} s and was ended"
    else:
        what = f"failed (signal {signal.Signals(-code).name})" if code < 0 else f"failed (exit code {code})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    last = f": {(errors or lines)[-1]}" if lines else ""
    raise UnavailableError(f"{tool} {what}{last}", fix)


def _exit_code(command: Sequence[str], log: Path, time_limit_s: float, environment: Mapping[str, str]) -> int | None:
    """Return a program's exit code after all its children have ended; None if it hung."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # A separate group, to end all descendants.
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start {Path(command[0]).name}: {error.strerror or error}") from error
        try:
            return process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the rest of the group: SIGTERM first, since profilers then release the counters, and SIGKILL later."""
    for number, patience_s in ((signal.SIGTERM, REACTION_S), (signal.SIGKILL, REACTION_S)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + patience_s
        while _is_group_alive(process) and time.monotonic() < deadline:
            time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(REACTION_S)


def _is_group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # an unreaped zombie would keep its group alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
