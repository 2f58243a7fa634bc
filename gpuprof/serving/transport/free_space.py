"""A best-fit allocator: free pieces of a range, which are split when taken and joined when released."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeSpace:
    """The free pieces of a range that begins at 0.

    Allocation is best fit, and the first among equal pieces: large pieces stay whole, and frequently used memory
    stays at the beginning.

    Examples
    --------
    >>> space = FreeSpace(100)
    >>> space.take(30), space.take(30), space.take(50)
    (0, 30, None)
    >>> space.give_back(0, 30)
    >>> space.give_back(30, 30)
    >>> space.take(100)
    0
    """

    def __init__(self, size: int) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._add(0, size)

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes and return their position, None without a large enough piece."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        free_size, start = self._by_size[at]
        self._remove(start)
        if free_size > size:
            self._add(start + size, free_size - size)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Free a piece, and merge it with its free neighbours."""
        at = bisect_left(self._starts, start)
        following = self._starts[at] if at < len(self._starts) else None
        before = self._starts[at - 1] if at else None
        if following == start + size:
            size += self._remove(following)
        if before is not None and before + self._sizes[before] == start:
            start, size = before, size + self._remove(before)
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (size, start))
        self._sizes[start] = size

    def _remove(self, start: int) -> int:
        """Forget a piece; return its size."""
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
