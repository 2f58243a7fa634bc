"""All minimal ways to serve a rate with segments of a few capacities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def minimal_covers(
    rate: float, capacities: Sequence[float], most_parts: int | None = None, limit: int = 500
) -> list[tuple[int, ...]] | None:
    """Return how often each capacity is taken in every cover that no segment can be left out of.

    Parameters
    ----------
    rate : float
    capacities : sequence of float, length n
        Above zero, in any order.
    most_parts : int, optional
        Covers of more segments are left out.
    limit : int
        None is returned when there are more covers than this.

    Returns
    -------
    list of tuple of int, length n
        The counts in the order of ``capacities``.
    """
    order = sorted(range(len(capacities)), key=lambda i: -capacities[i])
    falling = [capacities[i] for i in order]
    parts = math.inf if most_parts is None else most_parts
    found: list[tuple[int, ...]] = []
    for counts in _covers(rate * (1.0 - 1e-9), falling, parts):
        placed = [0] * len(order)
        for position, count in zip(order, counts, strict=True):
            placed[position] = count
        found.append(tuple(placed))
        if len(found) > limit:
            return None
    return found


def _covers(rest: float, falling: Sequence[float], parts: float) -> Iterator[tuple[int, ...]]:
    """Yield counts; since capacities fall, a cover is minimal when its last segment is needed."""
    if rest <= 0.0:
        yield (0,) * len(falling)
        return
    if not falling or parts < 1 or rest > falling[0] * parts:
        return
    most = math.ceil(rest / falling[0])
    if len(falling) == 1:
        if most <= parts:
            yield (most,)
        return
    for count in range(min(most, int(min(parts, most))), -1, -1):
        for counts in _covers(rest - count * falling[0], falling[1:], parts - count):
            yield (count, *counts)
