"""Memory of the process, and how unused memory is returned to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import time
from contextlib import suppress
from pathlib import Path

from gpuprof.serving.transport.arena import Arena

#: From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: One for the router's own thread, one for all others.
_HEAPS = 2
#: So much free memory a heap keeps at its end, and up to this size pieces come from a heap: the most that can be set.
_KEPT_BYTES = 32 << 20
#: Nothing to do: for so long no request and no more work for the router's thread than so much of the time.
_QUIET_S, _QUIET_PART = 3.0, 0.2
#: Beyond what the process has at rest and for requests: so much is returned at once, however much there is to do.
_EXCESS_BYTES = 96 << 20


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


class FreeMemory:
    """Returns memory that a busy time has left unused to the system. ``now``: monotonic seconds."""

    def __init__(self, arena: Arena, now: float) -> None:
        self._arena = arena
        self._looked_at = self._busy_at = now
        self._computed_s = time.thread_time()
        self._rest_bytes = private_bytes()

    async def return_free(self, now: float, is_asked: bool) -> bool:
        """Return memory if the server is idle, or far too much is unused; called periodically by the router's thread.

        ``now``: monotonic seconds; ``is_asked``: whether there are requests.

        Returns
        -------
        bool
            Whether all that is free was returned, and nobody asks for anything.
        """
        self._arena.trim()
        computed_s = time.thread_time() - self._computed_s
        is_busy = bool(self._arena.used) or is_asked or computed_s > _QUIET_PART * (now - self._looked_at)
        self._computed_s, self._looked_at = self._computed_s + computed_s, now
        if private_bytes() - self._rest_bytes - self._arena.used > _EXCESS_BYTES:
            # The more there is at a time, the more stays later, held by small pieces between.
            await asyncio.to_thread(return_free_memory)
        if is_busy:
            self._busy_at = now
        elif now - self._busy_at > _QUIET_S:
            self._busy_at = now
            gc.collect()  # what refused requests leave in cycles, with their bodies; nobody waits now
            await asyncio.to_thread(return_free_memory)
            self._rest_bytes = private_bytes()
            return True
        return False
