"""Patterns of replicas with their neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cutting_stock import CuttingStock
from gpuprof.placement.optimal.local_search import PartitionPlanner
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments

BUDGET = Options(latency_budget=0.5)


def _search(given: Problem, *, partial: bool = False) -> Placement:
    segments = Segments(given)
    choices = CandidateSegments(given, segments).list_choices()
    gpus = CuttingStock(given, PartitionPlanner(given, segments), choices, Limit(), partial).place()
    assert gpus is not None
    return Placement("", gpus)


def test_alike_demands_take_the_devices_of_their_best_pattern_at_any_number() -> None:
    """Two replicas of half a device each are 20% slower together, three of a third would be late."""
    estimator = LinearEstimator(slowdown=0.2, percents=(25.0, 50.0, 100.0))
    for count in (2, 7, 40):
        given = problem([demand(f"m{i}", 80.0, 60.0) for i in range(count)], estimator=estimator, options=BUDGET)
        patterns = _search(given)
        assert patterns.rates_rps() == pytest.approx({demand.model: 80.0 for demand in given.demands})
        most = max(sum(1 for _ in gpu.replicas()) for gpu in patterns.gpus)
        assert len(patterns.gpus) == -(-count // most)


def test_a_counted_fleet_serves_the_higher_priority_first() -> None:
    estimator = LinearEstimator(slowdown=0.2)
    low, high = demand("low", 900.0, 60.0), demand("high", 500.0, 60.0)
    given = problem([low, replace(high, priority=1)], [(plain_device(), 1)], estimator, BUDGET)
    rates = _search(given, partial=True).rates_rps()
    assert rates["high"] == pytest.approx(500.0) and rates.get("low", 0.0) < 900.0


def test_neighbours_that_slow_each_other_down_are_parted_in_the_final_map() -> None:
    """One replica a device serves the whole demand; four of a quarter each would be late beside one another."""
    estimator = LinearEstimator(slowdown=0.5, percents=(25.0, 100.0))
    given = problem([demand("m", 1500.0, 40.0)], estimator=estimator)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == ()
    assert all(sum(1 for _ in gpu.replicas()) <= 2 for gpu in placement.gpus)
