"""When a verb began: with its process, where that was started for it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

#: Place of a process's start behind its name in ``/proc/self/stat``, in ticks since the system began.
_STARTED = 19
#: What ``time.monotonic()`` said when the process began; empty where it is not for one verb.
_began_s: list[float] = []


def note_process_start() -> None:
    """Count time limits from when the process began: interpreter and imports take a good part of a short one."""
    with suppress(OSError, ValueError, IndexError, AttributeError):  # systems without it
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
        _began_s[:] = [time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)]


def verb_start_s() -> float:
    """Return what ``time.monotonic()`` said when the verb began."""
    return _began_s[0] if _began_s else time.monotonic()
