from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.sojourn import LAST_LOAD, grid_to_load, load_to_grid
from gpuprof.placement.rate_limit import find_load


@given(guess=st.floats(0.0, 1.0), limit=st.floats(1.0, 400.0))
def test_of_a_tail_that_the_grid_follows_the_load_is_found_wherever_the_search_begins(
    guess: float, limit: float
) -> None:
    loads: list[float] = []

    def tail_ms(load: float) -> float:
        loads.append(load)
        return 1.0 / (1.0 - load)

    best_load = find_load(tail_ms, limit, guess)
    beyond = limit < 1.0 / (1.0 - grid_to_load(0))
    assert best_load == (0.0 if beyond else pytest.approx(1.0 - 1.0 / limit, rel=1e-9))
    assert set(loads) <= {grid_to_load(index) for index in range(LAST_LOAD + 1)}
    assert len(loads) == len(set(loads)) <= 12


def test_a_limit_that_is_always_exceeded_leaves_no_load_and_one_that_never_is_the_most_of_the_grid() -> None:
    assert find_load(lambda _: math.inf, 1.0, 0.5) == 0.0
    assert find_load(lambda _: 0.5, 1.0, 0.5) == grid_to_load(LAST_LOAD - 1)


def test_where_the_queue_grows_without_bound_at_the_next_load_the_last_in_time_is_taken() -> None:
    assert find_load(lambda load: 1.0 if load < 0.5 else math.inf, 2.0, 0.3) == max(
        grid_to_load(index) for index in range(LAST_LOAD) if grid_to_load(index) < 0.5
    )


def test_under_a_limit_beyond_all_tails_the_most_of_the_grid_is_found() -> None:
    assert find_load(lambda _: 0.5, 1e300, 0.5) == grid_to_load(LAST_LOAD - 1)


@pytest.mark.parametrize("index", [0, 1, 17, 79])
def test_the_place_of_a_load_of_the_grid_is_its_number(index: int) -> None:
    assert load_to_grid(grid_to_load(index)) == pytest.approx(index, abs=0.02)
