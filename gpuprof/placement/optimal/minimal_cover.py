"""Enumerates the minimal covers of a rate by segments of a few capacities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpuprof.machine.machine_code import compile_untimed


def minimal_covers(
    rate: float, capacities: Sequence[float], most_parts: int | None = None, limit: int = 500
) -> list[tuple[int, ...]] | None:
    """Return the counts of each capacity in every minimal cover, where no segment can be left out.

    Parameters
    ----------
    capacities : sequence of float, length n
        Above zero, in any order.
    most_parts : int, optional
        Maximum number of segments in a cover.
    limit : int
        None is returned when there are more covers than this.

    Returns
    -------
    list of tuple of int, length n
        The counts in the order of ``capacities``.
    """
    order = np.argsort(-np.array(capacities, dtype=np.float64), kind="stable")
    sorted_capacities = np.array(capacities, dtype=np.float64)[order]
    listed_counts = np.zeros((limit, len(capacities)), dtype=np.int64)
    parts = math.inf if most_parts is None else float(most_parts)
    # Slightly less than the rate: three segments of a third each must cover it.
    count = fill_covers(rate * (1.0 - 1e-9), sorted_capacities, parts, listed_counts)
    if count < 0:
        return None
    covers = np.empty_like(listed_counts[:count])
    covers[:, order] = listed_counts[:count]
    return [tuple(counts) for counts in covers.tolist()]


def _fill_covers(rate: float, rates: npt.NDArray[np.float64], parts: float, covers: npt.NDArray[np.int64]) -> int:
    """Write the covers into the rows of ``covers`` and return their number, -1 where there are too few rows.

    Since capacities fall, a cover is minimal when its last segment is needed.
    """
    sizes = len(rates)
    counts = np.zeros(sizes, dtype=np.int64)
    rests, free_parts = np.empty(sizes + 1), np.empty(sizes + 1)
    rests[0], free_parts[0] = rate, parts
    depth, cover_count = 0, 0
    while True:
        need = rests[depth]
        if need > 0.0 and depth < sizes and free_parts[depth] >= 1.0 and need <= rates[depth] * free_parts[depth]:
            times = math.ceil(need / rates[depth])
            counts[depth] = times if times <= free_parts[depth] else int(free_parts[depth])
            if depth < sizes - 1 or counts[depth] == times:
                rests[depth + 1] = need - counts[depth] * rates[depth] if depth < sizes - 1 else 0.0
                free_parts[depth + 1] = free_parts[depth] - counts[depth]
                depth += 1
                continue
        elif need <= 0.0:
            if cover_count == len(covers):
                return -1
            covers[cover_count, :depth] = counts[:depth]
            cover_count += 1
        depth = min(depth, sizes - 1) - 1  # fewer of the last size never suffice
        while depth >= 0 and counts[depth] == 0:
            depth -= 1
        if depth < 0:
            return cover_count
        counts[depth] -= 1
        rests[depth + 1] = rests[depth] - counts[depth] * rates[depth]
        free_parts[depth + 1] = free_parts[depth] - counts[depth]
        depth += 1


#: Compiled: it tries hundreds of thousands of combinations, tens of times for each program.
fill_covers = compile_untimed(_fill_covers)
