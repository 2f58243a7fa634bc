from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.placement.optimal.restricted_master import minimal_covers


def brute_force(rate: float, capacities: list[float]) -> set[tuple[int, ...]]:
    most = [int(-(-rate // capacity)) for capacity in capacities]

    def total(counts: tuple[int, ...]) -> float:
        return sum(n * c for n, c in zip(counts, capacities, strict=True))

    def minimal(counts: tuple[int, ...]) -> bool:
        fewer = (tuple(n - (i == j) for i, n in enumerate(counts)) for j, count in enumerate(counts) if count)
        return total(counts) >= rate and all(total(cover) < rate for cover in fewer)

    return {counts for counts in product(*(range(n + 1) for n in most)) if minimal(counts)}


@given(rate=st.integers(1, 30), capacities=st.lists(st.integers(2, 20), min_size=1, max_size=3, unique=True))
def test_exactly_the_covers_that_nothing_can_be_left_out_of_are_found(rate: int, capacities: list[int]) -> None:
    covers = minimal_covers(float(rate), [float(capacity) for capacity in capacities])
    assert covers is not None
    assert len(covers) == len(set(covers))
    assert set(covers) == brute_force(rate, [float(capacity) for capacity in capacities])


def test_covers_of_too_many_parts_are_left_out() -> None:
    assert minimal_covers(10.0, [1.0, 6.0], most_parts=2) == [(0, 2)]
    assert minimal_covers(10.0, [1.0], most_parts=2) == []
    assert minimal_covers(10.0, [6.0, 4.0], most_parts=2) == [(2, 0), (1, 1)]  # the last part counts, too


def test_too_many_covers_are_not_listed() -> None:
    assert minimal_covers(1000.0, [1.0, 1.5, 2.0, 2.5], limit=100) is None
