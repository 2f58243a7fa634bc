"""Memory shared by the router and its workers, to pass tensors without copies."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from dataclasses import dataclass

#: Alignment of tensors: suitable for vector instructions, and a cache line.
ALIGNMENT = 64
#: Filling of released memory, if requested.
POISON = b"\xdb"
_POISONED = memoryview(POISON * (1 << 20))
_PAGE = mmap.PAGESIZE  # slots are whole pages, so no two share a page


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of an arena: ``size`` bytes from ``offset`` on."""

    offset: int
    size: int


class Arena:
    """Allocates slots of a shared memory file in the router; workers map the file and read and write.

    A slot has a single owner, who releases it once, after the last read or write. ``capacity``: limit in bytes of all
    slots; ``poison``: whether released memory is overwritten, to detect later reads.

    Attributes
    ----------
    used : int
        Bytes of slots.
    """

    def __init__(self, capacity: int, poison: bool = False) -> None:
        self.capacity = capacity
        # Unnamed: the file disappears however the router ends, and other processes cannot open it.
        self.fd = os.memfd_create("gpuprof-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        self._memory = memoryview(self._map)
        #: Free pieces, position and size, by position: the first that fits is taken, so that memory in frequent use
        #: stays at the beginning and large pieces stay whole.
        self._free = [(0, capacity)]
        self._taken: dict[int, int] = {}
        self._touched = 0
        self._poison = poison
        self.used = 0

    def take(self, size: int) -> Slot | None:
        """Return a slot of at least ``size`` bytes, None when the arena is full."""
        size = -(-max(1, size) // _PAGE) * _PAGE
        index = next((index for index, (_, free) in enumerate(self._free) if free >= size), None)
        if index is None:
            return None
        offset, free = self._free.pop(index)
        if free > size:
            self._free.insert(index, (offset + size, free - size))
        self._taken[offset] = size
        self._touched = max(self._touched, offset + size)
        self.used += size
        return Slot(offset, size)

    def give_back(self, slot: Slot) -> None:
        """Release a slot that is no longer read or written.

        Raises `RuntimeError` when the slot is not taken: its memory may have another owner already.
        """
        if self._taken.pop(slot.offset, 0) != slot.size:
            raise RuntimeError(f"the slot at {slot.offset} is given back twice")
        if self._poison:
            for begin in range(slot.offset, slot.offset + slot.size, len(_POISONED)):
                end = min(begin + len(_POISONED), slot.offset + slot.size)
                self._memory[begin:end] = _POISONED[: end - begin]
        self.used -= slot.size
        begin, end = slot.offset, slot.offset + slot.size
        index = bisect_left(self._free, (begin, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == begin:
            index -= 1
            begin, _ = self._free.pop(index)
        self._free.insert(index, (begin, end - begin))

    def view(self, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes from ``offset`` on, writable."""
        return self._memory[offset : offset + size]

    def trim(self) -> None:
        """Return the arena's memory to the system if no slot is in use."""
        if self._touched and not self._taken:
            # Frees the file's pages for all processes; MADV_DONTNEED would only unmap them here.
            self._map.madvise(mmap.MADV_REMOVE, 0, self._touched)
            self._touched = 0

    def close(self) -> None:
        """Close the file; workers that mapped the memory keep it until they end."""
        os.close(self.fd)


def map_arena(fd: int, capacity: int) -> memoryview:
    """Map the arena from a file descriptor inherited by a worker."""
    return memoryview(mmap.mmap(fd, capacity))
