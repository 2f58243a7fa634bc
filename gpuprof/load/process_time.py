"""CPU time of processes, to the nanosecond where the kernel reports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def list_process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for thread in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            for child in thread.read_text().split():
                yield from list_process_tree(int(child))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, over all its threads, to the nanosecond.

    Raises `OSError` when the process has ended, or the kernel keeps no such statistics.
    """
    # schedstat rather than stat, whose ticks of 10 ms are longer than a request.
    threads = list(_PROC.glob(f"{pid}/task/*/schedstat"))
    if not threads:
        raise ProcessLookupError(f"there is no process {pid}, or no statistics of it")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def runs_module(pid: int, module: str) -> bool:
    """Return whether a process was started as ``python -m module``."""
    with suppress(OSError):
        return module.encode() in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return False
