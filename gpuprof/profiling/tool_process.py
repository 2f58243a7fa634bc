"""Runs a profiler until it ends, or ends it and everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import GpuprofError, UnavailableError

_TAIL = 300
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Finished:
    """What a tool printed.

    Attributes
    ----------
    printed : str
        Standard output and standard error, as they came.
    log : Path
        The file that keeps it.
    """

    printed: str
    log: Path


def run_tool(
    command: Sequence[str],
    *,
    log: Path,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
    explain: Callable[[str], GpuprofError | None] = lambda printed: None,
) -> Finished:
    """Run ``command`` in a process group of its own and return what it printed.

    Parameters
    ----------
    command : sequence of str
    log : Path
        Where all that it prints goes.
    time_limit_s : float
        When these seconds have passed, the whole group is ended: a profiler's child outlives it otherwise.
    environment : mapping of str to str, optional
        Added to this process's own.
    explain : function
        What it printed → the error that people can mend, or None.

    Raises
    ------
    UnavailableError
        When it cannot be started, fails or takes too long, with its last words and the log's path.
    """
    tool = Path(command[0]).name
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C", **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start {tool}: {error.strerror or error}") from error
        try:
            code: int | None = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    printed = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        raise UnavailableError(
            f"{tool} did not end within {time_limit_s:g} s, so it and its children were ended{_words(printed)}",
            f"log: {log}; raise --time-limit",
        )
    if code != 0:
        raise explain(printed) or UnavailableError(f"{tool} failed ({_cause(code)}){_words(printed)}", f"log: {log}")
    return Finished(printed, log)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group: asked first, since profilers give the counters back when they are asked."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + patience_s
        while _alive(process) and time.monotonic() < deadline:
            time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a zombie of ours would keep its group alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f": {(errors or lines)[-1][:_TAIL]}" if lines else ""
