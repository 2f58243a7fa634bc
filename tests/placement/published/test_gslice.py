from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options
from gpuprof.placement.published.gslice import Gslice
from tests.placement.published.igniter_workloads import table_1, table_3
from tests.placement.published.test_igniter import igniters, plan
from tests.placement.table import TabledEstimator

BUDGET = Options(latency_budget=0.5)


def shares(placement: Placement) -> dict[str, tuple[int, float]]:
    return {r.model: (r.batch, r.share.sm_pct) for gpu in placement.gpus for r in gpu.replicas()}


def test_the_twelve_workloads_of_igniters_table_3_take_six_devices() -> None:
    # iGniter (TPDS'22) figure 14: GSLICE+ provisions six V100
    placement, _ = solve_and_check(Gslice(), igniters(table_3()))
    assert len(placement.gpus) == 6
    assert placement.unplaced == ()


def test_the_batch_is_as_large_as_the_slo_allows_and_not_as_large_as_the_rate_needs() -> None:
    # iGniter §2.3: GSLICE gives AlexNet a larger share and batch than iGniter's 10% and 4
    placement, _ = solve_and_check(Gslice(), igniters(table_1()))
    assert plan(placement) == [{("vgg19", 6, 37.5), ("resnet50", 8, 30.0), ("alexnet", 6, 12.5)}]


def test_alone_the_least_share_that_keeps_the_slo_is_taken() -> None:
    # batch 8 takes (2 + 8) ms / share and 20 ms are allowed: 50%, and 400 requests/s
    options = replace(BUDGET, max_batch=8)
    placement, _ = solve_and_check(Gslice(), problem([demand("m", 390.0, 40.1)], options=options))
    assert shares(placement) == {"m": (8, 50.0)}


def test_shares_grow_by_what_is_seen_beside_the_others() -> None:
    # each slows the other by a tenth, so a share that is just enough alone has to grow by a tenth
    demands = [demand("a", 100.0, 60.1), demand("b", 100.0, 60.1)]
    alone, _ = solve_and_check(Gslice(), problem(demands[:1], options=BUDGET))
    beside, _ = solve_and_check(Gslice(), problem(demands, estimator=LinearEstimator(slowdown=0.1), options=BUDGET))
    assert len(beside.gpus) == 1
    least = shares(alone)["a"][1]
    assert least < shares(beside)["a"][1] <= least * 1.1 + 2.5


def test_without_adjustments_whoever_misses_its_slo_gets_a_device_of_its_own() -> None:
    demands = [demand("a", 100.0, 60.1), demand("b", 100.0, 60.1)]
    given = problem(demands, estimator=LinearEstimator(slowdown=0.1), options=BUDGET)
    placement, _ = solve_and_check(Gslice(adjustments=0), given)
    assert [len(list(gpu.replicas())) for gpu in placement.gpus] == [1, 1]
    fixed = problem(demands, [(plain_device(), 1)], LinearEstimator(slowdown=0.1), BUDGET)
    placement, _ = solve_and_check(Gslice(adjustments=0), fixed)
    assert len(placement.gpus) == len(placement.unplaced) == 1


def test_shares_of_which_nothing_is_known_are_not_taken() -> None:
    # known at 50% only, where a fifth of the throughput is used: the share would shrink, but to what nobody knows
    table = TabledEstimator({Workload("m", 1, Share(50.0)): 1000.0, Workload("m", 1, Share(100.0)): 2000.0})
    given = replace(problem([demand("m", 200.0, 50.0)], options=BUDGET), estimator=table)
    placement, _ = solve_and_check(Gslice(unit_pct=50.0), given)
    assert shares(placement) == {"m": (1, 50.0)}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Gslice(threshold=1.0), "threshold must be above 0 and below 1 but got 1"),
        (Gslice(adjustments=-1), "adjustments must be at least 0 but got -1"),
        (Gslice(unit_pct=101.0), "unit_pct must be above 0 and at most 100 but got 101"),
    ],
)
def test_options_out_of_range_are_refused(policy: Gslice, message: str) -> None:
    with pytest.raises(InputError, match=message):
        policy.place(problem([demand("m")]))
