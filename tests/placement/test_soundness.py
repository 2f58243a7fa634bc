"""The optimal policy against everything that could be done, listed by code that shares nothing with it."""

from __future__ import annotations

import pytest

from bench.placement_problems import KINDS, Kind, TooLargeError, best_of, draw_problem
from bench.placement_soundness import is_bound_false, loss_of, run
from gpuprof.placement.contract import solve_and_check
from gpuprof.placement.optimal.optimal import Optimal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_map_does_better_than_a_bound_allows(kind: Kind, seed: int) -> None:
    problem = draw_problem(kind, seed)
    try:
        best = best_of(problem)
    except TooLargeError:
        pytest.skip("more than can be listed")
    placement, _ = solve_and_check(Optimal(), problem)
    assert not is_bound_false(placement, best)
    assert loss_of(problem, placement, best) > -1e-6, "the listing missed a map"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_many_bounds_is_false_and_no_map_is_unsound(kind: Kind) -> None:
    found = run(kind, 15, first=100)
    compared = [one for one in found if not one.too_large]
    assert len(compared) >= 9
    assert not [one for one in compared if one.unsound or one.false_bound or one.untold]
    assert sum(one.loss > 1e-6 for one in compared) <= 1
