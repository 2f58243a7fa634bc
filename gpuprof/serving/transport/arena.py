"""Memory that the router and its workers share, so that tensors cross between them without being copied."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

#: Tensors start at multiples of this: what vector instructions like, and a cache line.
ALIGNMENT = 64
_SMALLEST_BITS = 12  # slots are at least a page, so that two of them never share one
_STEPS = 4  # slot sizes between two powers of two


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of an arena: ``size`` bytes from ``offset`` on."""

    offset: int
    size: int


class Arena:
    """Hands out slots of a shared memory file; only the router does, workers map the file and read and write.

    Slots of one size are reused last in, first out, so that the memory in use stays small and in the cache: pages
    that were never handed out cost nothing.

    Parameters
    ----------
    capacity : int
        Bytes that all slots together may take.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("gpuprof-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        self._memory = memoryview(self._map)
        self._free: dict[int, list[int]] = {}
        self._next = 0
        self.used = 0

    def take(self, size: int) -> Slot | None:
        """Return a slot of at least ``size`` bytes, None when the arena is full."""
        rounded = _rounded(size)
        free = self._free.get(rounded)
        if free:
            offset = free.pop()
        elif self._next + rounded <= self.capacity:
            offset = self._next
            self._next += rounded
        else:
            larger = self._larger(rounded)
            if larger is None:
                return None
            rounded, offset = larger
        self.used += rounded
        return Slot(offset, rounded)

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that nobody reads or writes any more."""
        self.used -= slot.size
        self._free.setdefault(slot.size, []).append(slot.offset)

    def view(self, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes from ``offset`` on, writable."""
        return self._memory[offset : offset + size]

    def close(self) -> None:
        """Forget the memory; workers that mapped it keep it until they end."""
        os.close(self.fd)

    def _larger(self, rounded: int) -> tuple[int, int] | None:
        sizes = [size for size, offsets in self._free.items() if offsets and size > rounded]
        if not sizes:
            return None
        size = min(sizes)
        return size, self._free[size].pop()


def map_arena(fd: int, capacity: int) -> memoryview:
    """Map the arena whose file descriptor a worker inherited."""
    return memoryview(mmap.mmap(fd, capacity))


def _rounded(size: int) -> int:
    """Return the slot size for ``size`` bytes: a quarter step between powers of two, at most a quarter wasted."""
    bits = max(_SMALLEST_BITS, (max(1, size) - 1).bit_length())
    step = max(1 << _SMALLEST_BITS, (1 << bits) // (2 * _STEPS))
    return -(-max(1, size) // step) * step
