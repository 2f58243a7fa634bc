"""The optimal policy against everything that could be done, listed by code that shares nothing with it."""

from __future__ import annotations

import pytest

from gpuprof.placement.contract import solve_and_check
from gpuprof.placement.optimal.optimal import Optimal
from tests.placement.drawn_problems import (
    KINDS,
    Kind,
    TooLargeError,
    best_of,
    draw_problem,
    is_bound_false,
    is_called_best,
    loss_of,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_no_map_does_better_than_a_bound_allows(kind: Kind, seed: int) -> None:
    problem = draw_problem(kind, seed)
    try:
        best = best_of(problem)
    except TooLargeError:
        pytest.skip("more than can be listed")
    placement, _ = solve_and_check(Optimal(), problem)
    assert not is_bound_false(placement, best)
    loss = loss_of(problem, placement, best)
    assert loss > -1e-6, "the listing missed a map"
    assert loss < 1e-6 or not is_called_best(problem, placement)
