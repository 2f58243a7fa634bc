from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.profiling.timeline.attribution import NO_RANGE, find_innermost_ranges

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 2), st.integers(1, 2)), max_size=12)
MOMENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 2), st.integers(1, 3)), max_size=20)


def _frame(ranges: list[tuple[int, int, int, int]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_ns": [start for start, *_ in ranges],
            "end_ns": [start + length for start, length, *_ in ranges],
            "process_id": [process for *_, process, _ in ranges],
            "thread_id": [thread for *_, thread in ranges],
        },
        dtype=np.int64,
    )


@given(RANGES, MOMENTS)
def test_the_innermost_range_is_the_one_that_began_last_of_those_around(
    ranges: list[tuple[int, int, int, int]], moments: list[tuple[int, int, int]]
) -> None:
    innermost = find_innermost_ranges(
        _frame(ranges),
        np.array([process for _, process, _ in moments], dtype=np.int64),
        np.array([thread for *_, thread in moments], dtype=np.int64),
        np.array([moment for moment, *_ in moments], dtype=np.int64),
    )
    for (moment, process, thread), row in zip(moments, innermost.tolist(), strict=True):
        around = [
            start for start, length, p, t in ranges if (p, t) == (process, thread) and start <= moment < start + length
        ]
        if not around:
            assert row == NO_RANGE
        else:
            start, length, p, t = ranges[row]
            assert (p, t) == (process, thread) and start <= moment < start + length
            assert start == max(around)


def test_of_ranges_that_begin_together_the_shorter_is_the_inner_one() -> None:
    ranges = _frame([(10, 5, 1, 1), (10, 20, 1, 1)])
    ids = np.array([1, 1], dtype=np.int64)
    assert find_innermost_ranges(ranges, ids, ids, np.array([12, 18])).tolist() == [0, 1]
