"""Integer units of a partition's memory, for knapsacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.placement.optimal.knapsack import best_packing

#: Maximum cells of shares times memory for pricing.
_MOST_CELLS = 200_000


@dataclass(frozen=True, slots=True)
class MemoryGrid:
    """Counts bytes of a kind of partition."""

    unit: int = 0  #: Bytes; 0 where memory does not bind and is not counted.
    capacity: int = 0  #: Units the partition holds.
    #: Round the memory of replicas down, which gives bounds; else up, which gives feasible packings.
    relaxed: bool = False

    @property
    def is_exact(self) -> bool:
        """Return whether nothing is rounded."""
        return self.unit <= 1

    def count(self, memory_bytes: int | None) -> int:
        """Return the units of ``memory_bytes``; unknown memory takes none."""
        if not self.unit or not memory_bytes:
            return 0
        return memory_bytes // self.unit if self.relaxed else -(-memory_bytes // self.unit)


def is_binding(units: Sequence[int], memory_bytes: Sequence[int], space: int, capacity_bytes: int) -> bool:
    """Return whether replicas whose shares fit together may exceed the memory.

    Parameters
    ----------
    units : sequence of int
        The share of each, as a part of ``space``.
    memory_bytes : sequence of int
        The memory of each.
    space, capacity_bytes : int
        Of the partition.
    """
    _, most = best_packing(units, [float(size) for size in memory_bytes], space)
    return most > capacity_bytes


def make_grid(capacity_bytes: int, space: int, *, relaxed: bool) -> MemoryGrid:
    """Return a grid coarse enough for pricing over ``space`` parts of a share."""
    steps = max(1, _MOST_CELLS // max(1, space))
    unit = math.ceil(capacity_bytes / steps)
    return MemoryGrid(unit, capacity_bytes // unit, relaxed)
