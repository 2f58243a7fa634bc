"""Start time of a verb: the start of its process, where this is the ``gpuprof`` command."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

#: Place of a process's start behind its name in ``/proc/self/stat``, in ticks since the system began.
_STARTED = 19
#: ``time.monotonic()`` at the start of the process; empty in other programs than the ``gpuprof`` command.
_began_s: list[float] = []


def note_process_start() -> None:
    """Count time limits from the start of the process: interpreter and imports take a good part of a short limit."""
    with suppress(OSError, ValueError, IndexError, AttributeError):  # systems without /proc or this clock
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
        _began_s[:] = [time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)]


def verb_start_s() -> float:
    """Return ``time.monotonic()`` at the start of the verb."""
    return _began_s[0] if _began_s else time.monotonic()
