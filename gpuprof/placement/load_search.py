"""Searches the largest load at which a percentile keeps its limit, on the grid of solved loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gpuprof.domain.sojourn import LAST_LOAD, grid_to_load, load_to_grid

#: Number of steps between bisections: guesses may converge from one side only.
HALVED = 3


def find_load(tail_ms: Callable[[float], float], limit_ms: float, guess: float) -> float:
    """Return the largest load in time; 0.0 where the least load of the grid is late.

    Only loads of `gpuprof.domain.sojourn.grid_to_load` are solved; between the last load in time and the next, the tail
    is assumed linear in 1 / (1 - load), which also gives the next load to solve. ``tail_ms``: load, a part of the
    capacity → time that must not exceed the limit; rises with the load; ``guess``: initial load.

    Examples
    --------
    Where a tail is 10 ms / (1 - load), 50 ms are reached at a load of 0.8:

    >>> round(find_load(lambda load: 10.0 / (1.0 - load), limit_ms=50.0, guess=0.5), 6)
    0.8
    """
    tails: dict[int, float] = {}
    low, high = -1, LAST_LOAD  # the last load is assumed late
    index = round(load_to_grid(min(max(guess, 0.0), 0.99)))
    while high - low > 1:
        index = min(max(index, low + 1), high - 1)
        tails[index] = tail_ms(grid_to_load(index))
        if tails[index] > limit_ms:
            high = index
        else:
            low = index
        index = (low + high) // 2 if len(tails) % HALVED == 0 else _guess_index(tails, low, high, limit_ms)
    if low < 0:
        return 0.0
    return grid_to_load(low) if high == LAST_LOAD else _interpolate_crossing(tails, low, high, limit_ms)


def _guess_index(tails: Mapping[int, float], low: int, high: int, limit_ms: float) -> int:
    """Return the index of the load up to which the tail is likely in time."""
    if low in tails and high in tails:
        return (
            low + 1 if math.isinf(tails[high]) else int(load_to_grid(_interpolate_crossing(tails, low, high, limit_ms)))
        )
    index = low if low in tails else high
    if math.isinf(tails[index]) or tails[index] <= 0.0:
        return (low + high) // 2
    stretch = max(1.0, limit_ms / tails[index] / (1.0 - grid_to_load(index)))
    return int(load_to_grid(min(1.0 - 1.0 / stretch, grid_to_load(LAST_LOAD))))


def _interpolate_crossing(tails: Mapping[int, float], low: int, high: int, limit_ms: float) -> float:
    """Return the load between two solved loads at which the tail reaches the limit."""
    first, last = (1.0 / (1.0 - grid_to_load(index)) for index in (low, high))
    part = (limit_ms - tails[low]) / (tails[high] - tails[low])
    return 1.0 - 1.0 / (first + (last - first) * part)
