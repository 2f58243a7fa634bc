"""The unbounded knapsack problem with one or two capacities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def best_packing(
    sizes: Sequence[int],
    values: Sequence[float],
    capacity: int,
    weights: Sequence[int] | None = None,
    most_weight: int = 0,
) -> tuple[tuple[int, ...], float]:
    """Return the multiplicity of each size in a packing of the greatest value, and the value.

    Exact, by dynamic programming over the capacity and the weight. Taking a size n times is split into taking it 1, 2,
    4, … times at once, so that each step is a single array operation.

    Parameters
    ----------
    sizes : sequence of int, length n
        Above zero.
    values : sequence of float, length n
        Sizes of value zero or less are never taken.
    weights : sequence of int, length n, optional
        A second size, whose sum in a packing is at most ``most_weight``.
    """
    # The largest common unit of all sizes gives the smallest tables and the same answer.
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    best = np.zeros((space + 1, most_weight + 1))
    steps: list[tuple[int, int, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]] = []
    item_weights = [0] * len(sizes) if weights is None else weights
    for index, (size, value) in enumerate(zip(sizes, values, strict=True)):
        width, height, times = size // unit, item_weights[index], 1
        while value > 0.0 and times * width <= space and times * height <= most_weight:
            space_offset, weight_offset = times * width, times * height
            improved = np.zeros(best.shape, dtype=bool)
            candidate = best[: space + 1 - space_offset, : most_weight + 1 - weight_offset] + times * value
            improved[space_offset:, weight_offset:] = candidate > best[space_offset:, weight_offset:]
            best[space_offset:, weight_offset:] = np.maximum(best[space_offset:, weight_offset:], candidate)
            steps.append((index, times, improved))
            times *= 2
    counts, free, light = [0] * len(sizes), space, most_weight
    # Backwards: whether a step was taken depends on the space left by the steps before it.
    for index, times, improved in reversed(steps):
        if improved[free, light]:
            counts[index] += times
            free -= times * (sizes[index] // unit)
            light -= times * item_weights[index]
    return tuple(counts), float(best[space, most_weight])


def multisets(sizes: Sequence[int], capacity: int) -> float:
    """Return the number of multisets of sizes within the capacity, the empty multiset included."""
    unit = math.gcd(capacity, *sizes)
    space = capacity // unit
    counts = np.zeros(space + 1)
    counts[0] = 1.0
    for size in sizes:
        width = size // unit
        for start in range(width, space + 1, width):
            part = counts[start : start + width]
            part += counts[start - width : start - width + len(part)]
    return float(counts.sum())
