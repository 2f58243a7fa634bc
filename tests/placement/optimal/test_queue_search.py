"""Maps of many demands by queues, from tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpuprof.domain.sojourn import Arrivals
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import queue_tables
from gpuprof.placement.optimal.class_program import DemandPart
from gpuprof.placement.optimal.pooled_planner import PooledPlanner
from gpuprof.placement.optimal.queue_search import QueueSearch
from gpuprof.placement.optimal.queue_tables import QueueTables, find_root
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.segment import Segments
from tests.placement.optimal.test_portfolio import queued_problem


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "margin"), [(0, 1.0), (1, 1.0), (2, 1.3)])
def test_a_map_from_tables_of_queues_is_sound_serves_everybody_and_costs_no_more_than_a_quick_policys(
    monkeypatch: pytest.MonkeyPatch, seed: int, margin: float
) -> None:
    given = queued_problem(seed, 24, 900.0, None)
    # Tables may promise too much: queues are asked of what is chosen.
    monkeypatch.setattr(queue_tables, "_OF_SLO", margin * queue_tables._OF_SLO)
    quick = make_policy("igniter").place(given)
    gpus = QueueSearch(given, Segments(given), (), Limit(), known=quick.gpus).search()
    assert gpus is not None
    placement = Placement("optimal", gpus)
    assert check(to_map(given, placement), evidence(given)) == ()
    served = placement.rates_rps()
    assert all(served[one.model] == pytest.approx(one.rate_rps) for one in given.demands)
    assert quick.unplaced or len(gpus) <= len(quick.gpus)


def test_the_better_of_a_quick_policys_map_and_one_from_tables_is_kept_with_a_bound() -> None:
    given = queued_problem(5, 24, 900.0, None)
    planner = PooledPlanner(given, Segments(given), Limit())
    quick = make_policy("igniter").place(given)
    found = planner.plan_by_tables(quick, quick.gpus)
    assert found is not None and found.found_by is not None
    assert 0 < (found.lower_bound_gpus or 0) <= len(found.gpus) < len(quick.gpus)
    assert found.found_by.startswith("patterns by queues") and not found.unplaced
    cheap = replace(quick, gpus=quick.gpus[:1])
    assert planner.plan_by_tables(cheap, quick.gpus) is cheap


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_late_from_about_the_time_on_that_they_may_take(seed: int) -> None:
    given = queued_problem(seed, 4, 900.0, None)
    segments, entry = Segments(given), given.fleet.entries[0]
    tables, told = QueueTables(given, segments), 0
    for demand in given.demands:
        part = DemandPart(demand.model, 2)
        for workload, longest_ms in tables._list_known(entry, part):
            server = segments.undisturbed_server(entry.device, workload)
            told += 1
            for factor, is_late in ((0.8, False), (1.2, True)):
                scale = factor * longest_ms / server.latency_ms[-1]
                slowed = replace(server, latency_ms=tuple(scale * one for one in server.latency_ms))
                if slowed.capacity_rps <= 0.5 * demand.rate_rps:
                    assert is_late
                    continue
                found = given.queueing.sojourn(Arrivals(0.5 * demand.rate_rps), slowed)
                assert (found.percentile(demand.slo.percentile) > demand.slo.latency_ms) is is_late
    assert told


@pytest.mark.parametrize("guess", [1e-3, 0.3, 0.5, 2.0])
def test_the_root_of_a_rising_function_is_found_from_below_wherever_it_is_guessed(guess: float) -> None:
    found = find_root(lambda one: 20.0 * math.log(one / 0.4), 1.0, guess)
    assert 0.39 < found <= 0.4
    assert find_root(lambda one: math.inf if one > 0.4 else -9.0, 1.0, guess) == pytest.approx(0.4, rel=0.05)
    assert find_root(lambda _: 1.0, 1.0, guess) < 0.01
