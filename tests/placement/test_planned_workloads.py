from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import ExponentialQueue, LinearEstimator, demand, plain_device, problem
from gpuprof.placement.planned_workloads import PlannedWorkloads, find_alike, planned_ms
from gpuprof.placement.problem import MEANS, Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator


def test_planning_with_confidence_takes_the_upper_end_and_extrapolates_it() -> None:
    figure = Figure(10.0, MEASURED, 9.0, 11.0)
    assert planned_ms(figure, None) == 10.0
    assert planned_ms(figure, 0.9) == pytest.approx(11.0)
    assert planned_ms(figure, 0.99) == pytest.approx(10.0 + 2.5758 / 1.6449, rel=1e-4)
    assert planned_ms(Figure(10.0, MEASURED), 0.9) == 10.0


@pytest.mark.parametrize(
    ("source", "planned"),
    [
        (MEASURED, 10.0),
        (INTERPOLATED, 10.0),
        ("sum of its models, interpolated", 10.0),
        (EXTRAPOLATED, 15.0),
        ("roofline, uncalibrated", 15.0),
        ("measured × linear", 15.0),
    ],
)
def test_what_nobody_observed_is_planned_at_its_upper_end(source: str, planned: float) -> None:
    figure = Figure(10.0, source, 5.0, 15.0)
    assert planned_ms(figure, None) == planned
    assert planned_ms(figure, MEANS) == 10.0


def test_neighbours_are_asked_about_only_where_there_are_some() -> None:
    slowed = replace(problem([demand("m")]), estimator=LinearEstimator(slowdown=1.0))
    workloads, device = PlannedWorkloads(slowed), plain_device()
    beside = (Workload("n", 1, Share(25.0)),)
    assert workloads.latency_ms(device, Workload("m", 1, Share())) == 3.0
    assert workloads.latency_ms(device, Workload("m", 1, Share()), beside) == 6.0


def test_another_estimator_and_another_confidence_have_answers_of_their_own() -> None:
    given = problem([demand("m")], estimator=LinearEstimator(interval=0.2))
    workload = Workload("m", 4, Share(50.0))
    means = Segments(given).server(plain_device(), workload).latency_ms
    slower = replace(given, estimator=LinearEstimator(start_ms=9.0))
    careful = replace(given, options=Options(confidence=0.9))
    assert Segments(slower).server(plain_device(), workload).latency_ms > means
    assert Segments(careful).server(plain_device(), workload).latency_ms > means
    assert Segments(given).server(plain_device(), workload).latency_ms == means


def make_problem(demands: tuple[Demand, ...], spread: float = 0.0) -> Problem:
    fleet = Fleet((FleetEntry(plain_device()),))
    return Problem(demands, fleet, CurvedEstimator(spread=spread), ExponentialQueue(), Options(latency_budget=0.5))


def test_equal_demands_for_one_model_under_two_names_are_alike() -> None:
    base = Demand("m0", 100.0, Slo(50.0))
    given = (base, replace(base, model="m1"), Demand("m2", 100.0, Slo(60.0)), replace(base, model="m3", priority=1))
    assert find_alike(make_problem(given)) == {"m0": "m0", "m1": "m0", "m2": "m2", "m3": "m3"}


def test_equal_demands_for_two_models_are_not_alike() -> None:
    given = (Demand("m0", 100.0, Slo(50.0)), Demand("m1", 100.0, Slo(50.0)))
    assert find_alike(make_problem(given, spread=0.1)) == {"m0": "m0", "m1": "m1"}


def test_segments_of_one_that_is_alike_are_those_of_the_first_under_its_own_name() -> None:
    given = make_problem((Demand("m0", 100.0, Slo(50.0)), Demand("m1", 100.0, Slo(50.0))))
    segments, device = Segments(given), given.device("plain")
    first, second = (segments.best(demand, device) for demand in given.demands)
    assert first
    assert second == tuple(replace(item, model="m1") for item in first)
    # asked for at another rate it is looked at by itself
    more = replace(given.demands[1], rate_rps=200.0)
    assert Segments(given).best(more, device) != second
