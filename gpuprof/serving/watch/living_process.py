"""A process to supervise, started by this process or adopted from a predecessor."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


class LivingProcess:
    """Refers to a process by a descriptor, which stays valid when its id is given to another process.

    Raises `OSError` when there is no such process.

    Parameters
    ----------
    child : Popen or None
        The process, where this process started it.
    """

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._descriptor = os.pidfd_open(pid)

    @classmethod
    def adopt(cls, pid: int, started: int) -> LivingProcess | None:
        """Return the process with this id and start time; None when it has ended."""
        try:
            process = cls(pid)
        except OSError:
            return None
        if start_time(pid) == started:
            return process
        process.release()
        return None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""
        return self._descriptor

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return bool(select.select([self._descriptor], [], [], 0.0)[0])

    def kill(self) -> None:
        """Kill the process; no error when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def release(self) -> None:
        """Close the descriptor."""
        if self._child is not None:
            self._child.wait()
        os.close(self._descriptor)


def start_time(pid: int) -> int:
    """Return the start time of a process, in the kernel's clock ticks since the boot; -1 when there is none."""
    try:
        # Fields after the last bracket: the name in brackets may itself hold spaces and brackets (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return -1
    return int(fields[19])
