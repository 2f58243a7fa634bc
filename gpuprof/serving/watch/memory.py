"""What the process has in memory, and how it returns what nobody uses any more to the system."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

#: From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: One for the router's own thread, one for all others.
_HEAPS = 2
#: So much free memory a heap keeps at its end, and up to this size pieces come from a heap: the most that can be set.
_KEPT_BYTES = 32 << 20


def set_up_heaps() -> None:
    """Let all threads share a few heaps that keep free memory for the next message; called before there are threads.

    The GNU C library has up to eight for each core, and what is free in one nobody else uses: how much memory the
    threads of gRPC keep then grows with the machine. By itself it also returns the end of a heap to the system at once
    where more than twice the largest message is free there, and every page of the next message is then a page fault:
    145 for a request of 600 KB. `return_free_memory` returns it all the same. Nothing happens where the C library is
    another one.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, _HEAPS)
        library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_free_memory() -> None:
    """Let the C library return what it keeps for later; nothing happens where it has no such function."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Return the bytes in memory that the process shares with nobody and that no file stands behind."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
