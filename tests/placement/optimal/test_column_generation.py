from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import pattern
from gpuprof.placement.optimal.restricted_master import RestrictedMaster, solve_relaxation
from gpuprof.placement.segment import Segment

PRICES = {"plain": 1.0}


def master(percents: list[float]) -> RestrictedMaster:
    """One replica of each model, of so many percent."""
    shares = {f"m{number}": percent for number, percent in enumerate(percents)}
    choices = {
        model: (Segment(model, "plain", Share(percent), 1, 1, 10.0, percent / 100.0, None, 1.0),)
        for model, percent in shares.items()
    }
    return RestrictedMaster([FleetEntry(plain_device())], [demand(model, 10.0) for model in shares], choices)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.integers(2, 30), min_size=2, max_size=7, unique=True))
def test_generated_patterns_bound_as_well_as_listed_ones(steps: list[int]) -> None:
    percents = [2.5 * step for step in steps]
    listed = master(percents)
    solution, bound = solve_relaxation(listed, PRICES, Limit())
    assert solution is not None
    assert bound == pytest.approx(solution.objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern, "_MOST_LOOKED_AT", 0)
        generated = master(percents)
        assert generated.generated
        again, generated_bound = solve_relaxation(generated, PRICES, Limit())
    assert again is not None
    assert again.objective == pytest.approx(solution.objective)
    assert generated_bound == pytest.approx(bound, rel=1e-5)


def test_when_the_time_is_up_the_bound_holds_all_the_same() -> None:
    percents = [2.5 * step for step in range(3, 31)]
    unfinished = master(percents)
    assert unfinished.generated
    _, bound = solve_relaxation(unfinished, PRICES, Limit(1e-9))
    _, true = solve_relaxation(master(percents), PRICES, Limit())
    assert 0.0 < bound <= true * (1.0 + 1e-9)
    assert true >= math.fsum(percents) / 100.0 * (1.0 - 1e-6)
