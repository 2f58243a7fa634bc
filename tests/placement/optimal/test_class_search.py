from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.placement.contract import ExponentialQueue, evidence, plain_device, sliced_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import class_search
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.class_search import ClassSearch
from gpuprof.placement.optimal.demand_classes import is_of_few_classes
from gpuprof.placement.optimal.minimise_cost import bound_relaxed
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator

#: Rates (requests/s) and SLOs (ms) of three classes.
ASKED = ((110.0, 80.0), (250.0, 100.0), (520.0, 60.0))


def problem(copies: int, disturbance: float = 0.0, *, sliced: bool = False, count: int | None = None) -> Problem:
    pairs = enumerate(ASKED * copies)
    demands = tuple(Demand(f"m{number}", rate, Slo(slo)) for number, (rate, slo) in pairs)
    device = sliced_device() if sliced else plain_device()
    estimator = CurvedEstimator(spread=0.0, disturbance=disturbance, yields=1.0)
    return Problem(
        demands, Fleet((FleetEntry(device, count),)), estimator, ExponentialQueue(), Options(latency_budget=0.5)
    )


@pytest.fixture(autouse=True)
def _ask_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_search, "_MOST_ASKED", 15_000)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("disturbance", [0.0, 0.3])
def test_a_map_of_classes_is_sound_serves_everybody_and_takes_hardly_more_than_the_bound_of_any_map(
    disturbance: float, *, sliced: bool
) -> None:
    given = problem(12, disturbance, sliced=sliced)
    segments = Segments(given)
    assert is_of_few_classes(given, segments)
    gpus = ClassSearch(given, segments, Limit()).search([])
    assert gpus is not None
    placement = Placement("optimal", gpus)
    assert check(to_map(given, placement), evidence(given)) == ()
    served = placement.rates_rps()
    assert all(served[one.model] == pytest.approx(one.rate_rps) for one in given.demands)
    price = given.fleet.entries[0].price_per_hour
    offers = CandidateSegments(given, segments)
    offers.resolve_all_guesses()
    bound = bound_relaxed(given, given.demands, offers, Limit()) / price
    assert len(gpus) >= bound - 1e-6
    assert disturbance or len(gpus) <= bound * 1.1 + 1.0  # the bound knows nothing of neighbours


def test_a_fleet_that_is_too_small_for_everybody_has_no_such_map() -> None:
    given = problem(4, count=2)
    assert ClassSearch(given, Segments(given), Limit()).search([]) is None


def test_demands_that_are_all_different_are_no_classes() -> None:
    given = problem(1)
    assert not is_of_few_classes(given, Segments(given))


@pytest.mark.slow
def test_with_a_time_limit_the_map_is_no_worse_than_the_quickest_policys_and_says_a_bound() -> None:
    given = problem(6, 0.3)
    limited = replace(given, options=replace(given.options, time_limit_s=8.0))
    placement, _ = solve_and_check(Optimal(), limited)
    assert not placement.unplaced
    assert len(placement.gpus) <= len(make_policy("igniter").place(given).gpus)
    assert placement.lower_bound_gpus is not None
    assert 0 < placement.lower_bound_gpus <= len(placement.gpus)
