from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.placement.optimal.pattern import best_packing, multisets


@given(
    items=st.lists(st.tuples(st.integers(3, 12), st.floats(-1.0, 9.0)), min_size=1, max_size=3),
    capacity=st.integers(1, 20),
)
def test_it_is_as_good_as_trying_everything(items: list[tuple[int, float]], capacity: int) -> None:
    sizes, values = [size for size, _ in items], [value for _, value in items]
    counts, value = best_packing(sizes, values, capacity)
    every = [
        taken
        for taken in product(*(range(capacity // size + 1) for size in sizes))
        if sum(n * size for n, size in zip(taken, sizes, strict=True)) <= capacity
    ]
    best = max(sum(n * worth for n, worth in zip(taken, values, strict=True)) for taken in every)
    assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= capacity
    assert sum(n * worth for n, worth in zip(counts, values, strict=True)) == pytest.approx(value)
    assert value == pytest.approx(best)
    assert multisets(sizes, capacity) == len(every)
