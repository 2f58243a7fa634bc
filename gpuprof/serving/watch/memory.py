"""What the process has in memory, and how it returns what nobody uses any more to the system."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

#: From malloc.h of the GNU C library.
_M_ARENA_MAX = -8
#: One for the router's own thread, one for all others.
_HEAPS = 2


def limit_heaps() -> None:
    """Let all threads share a few heaps; to be called before there are threads.

    The GNU C library has up to eight for each core, and what is free in one nobody else uses: how much memory the
    threads of gRPC keep then grows with the machine. Nothing happens where the C library is another one.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)


def return_free_memory() -> None:
    """Let the C library return what it keeps for later; nothing happens where it has no such function."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Return the bytes in memory that the process shares with nobody and that no file stands behind."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
