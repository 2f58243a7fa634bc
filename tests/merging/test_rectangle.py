from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpuprof.merging.similarity import Mask, largest_rectangle


def _by_trying_all(mask: Mask) -> int:
    rows, columns = mask.shape
    return max(
        (
            (b - t) * (r - left)
            for t in range(rows)
            for b in range(t + 1, rows + 1)
            for left in range(columns)
            for r in range(left + 1, columns + 1)
            if mask[t:b, left:r].all()
        ),
        default=0,
    )


@given(arrays(np.bool_, st.tuples(st.integers(1, 7), st.integers(1, 7))))
def test_it_is_as_large_as_the_best_of_all_rectangles_and_all_true(mask: Mask) -> None:
    row, column, rows, columns = largest_rectangle(mask)
    assert rows * columns == _by_trying_all(mask)
    assert mask[row : row + rows, column : column + columns].all()


def test_a_matrix_of_trues_is_one_rectangle_and_one_of_falses_none() -> None:
    assert largest_rectangle(np.ones((3, 4), np.bool_)) == (0, 0, 3, 4)
    assert largest_rectangle(np.zeros((3, 4), np.bool_)) == (0, 0, 0, 0)
