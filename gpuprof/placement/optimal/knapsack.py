"""The unbounded knapsack: what of some sizes, each as often as wanted, is worth most within a capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def best_packing(sizes: Sequence[int], values: Sequence[float], capacity: int) -> tuple[tuple[int, ...], float]:
    """Return how often each size is taken in a packing of the greatest value, and the value.

    Exact, by dynamic programming over the capacity; taking a size n times is split into taking it 1, 2, 4, … times at
    once, so that each step is one operation on arrays.

    Parameters
    ----------
    sizes : sequence of int, length n
        Above zero.
    values : sequence of float, length n
        What is worth nothing is never taken.
    capacity : int
    """
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    best = np.zeros(space + 1)
    steps: list[tuple[int, int, np.ndarray[tuple[int], np.dtype[np.bool_]]]] = []
    for index, (size, value) in enumerate(zip(sizes, values, strict=True)):
        times = 1
        while value > 0.0 and times * (size // unit) <= space:
            width = times * (size // unit)
            taken = np.zeros(space + 1, dtype=bool)
            with_it = best[:-width] + times * value
            taken[width:] = with_it > best[width:]
            best[width:] = np.maximum(best[width:], with_it)
            steps.append((index, times, taken))
            times *= 2
    counts, left = [0] * len(sizes), space
    for index, times, taken in reversed(steps):
        if taken[left]:
            counts[index] += times
            left -= times * (sizes[index] // unit)
    return tuple(counts), float(best[space])


def multisets(sizes: Sequence[int], capacity: int) -> float:
    """Return in how many ways sizes can be taken, each any number of times, within the capacity; none at all is one."""
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    ways = np.zeros(space + 1)
    ways[0] = 1.0
    for size in sizes:
        width = size // unit
        for start in range(width, space + 1, width):
            part = ways[start : start + width]
            part += ways[start - width : start - width + len(part)]
    return float(ways.sum())
