"""Finds the range that encloses each of many instants of a thread, vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NO_RANGE = -1
_FOREVER = np.iinfo(np.int64).max


def find_innermost_ranges(
    ranges: pd.DataFrame, process_id: Integers, thread_id: Integers, moment_ns: Integers
) -> Integers:
    """Return for each moment the row of the innermost range around it on its thread.

    A launch call runs on a single thread and returns before any enclosing range ends, so its start determines the range
    of the launched kernel, whenever the kernel ran.

    Parameters
    ----------
    ranges : DataFrame
        ``start_ns``, ``end_ns``, ``process_id``, ``thread_id``.
    process_id, thread_id, moment_ns : ndarray of int64, shape (n,)

    Returns
    -------
    ndarray of int64, shape (n,)
        Positions of rows; `NO_RANGE` without an enclosing range.
    """
    innermost = np.full(len(moment_ns), NO_RANGE, dtype=np.int64)
    if not len(ranges) or not len(innermost):
        return innermost
    starts, ends = _integers(ranges["start_ns"]), _integers(ranges["end_ns"])
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, owner in enumerate(zip(ranges["process_id"].tolist(), ranges["thread_id"].tolist(), strict=True)):
        rows_of.setdefault(owner, []).append(row)
    for (process, thread), rows in rows_of.items():
        here = np.flatnonzero((process_id == process) & (thread_id == thread))
        if len(here):
            chosen = np.array(rows, dtype=np.int64)
            borders, holders = _segments(starts[chosen], ends[chosen])
            segment = np.searchsorted(borders, moment_ns[here], side="right") - 1
            local = np.where(segment >= 0, holders[np.maximum(segment, 0)], NO_RANGE)
            innermost[here] = np.where(local == NO_RANGE, NO_RANGE, chosen[np.maximum(local, 0)])
    return innermost


def _segments(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Cut a thread's time at every border of a range; return the borders and the innermost range after each."""
    n = len(starts)
    times = np.concatenate([starts, ends])
    opens = np.concatenate([np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)])
    # Among simultaneous events, ends come before begins; of ranges with the same begin the longest is the outer range.
    outer_first = np.concatenate([_FOREVER - ends, np.zeros(n, dtype=np.int64)])
    order = np.lexsort((outer_first, opens, times))
    holders = np.full(2 * n, NO_RANGE, dtype=np.int64)
    open_ranges: list[int] = []
    closed = bytearray(n)
    for position, event in enumerate(order.tolist()):
        if event < n:
            open_ranges.append(event)
        else:
            closed[event - n] = 1
        while open_ranges and closed[open_ranges[-1]]:
            open_ranges.pop()
        holders[position] = open_ranges[-1] if open_ranges else NO_RANGE
    return times[order], holders


def _integers(values: pd.Series[Any]) -> Integers:
    return values.to_numpy(dtype=np.int64)
