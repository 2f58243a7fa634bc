"""The program of Elvinger's thesis (§5.4.3) on several kinds of device; its own examples are in test_usher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.placement.contract import demand, plain_device, problem, solve_and_check
from gpuprof.placement.problem import Options
from gpuprof.placement.published.milp import Milp
from tests.placement.published.test_usher import Needs

BUDGET = Options(latency_budget=1.0)
LARGE = replace(plain_device("large", 5.0), dram_bytes=40 * 2**30)


def test_each_model_goes_to_the_kind_of_device_that_can_host_it() -> None:
    # both need 60% of the compute, so they cannot share, and the big one fits the large device only
    needs = Needs(creq=(("small", 60.0), ("big", 60.0)), gib=(("small", 2.0), ("big", 20.0)))
    given = problem([demand("small", 100.0), demand("big", 100.0)], [(LARGE, 1), (plain_device(), 1)], needs, BUDGET)
    placement, deployment = solve_and_check(Milp(), given)
    assert {gpu.device: [replica.model for replica in gpu.replicas()] for gpu in placement.gpus} == {
        "large": ["big"],
        "plain": ["small"],
    }
    assert deployment.predicted.goodput_rps == pytest.approx(200.0)


def test_memory_is_counted_in_each_devices_own() -> None:
    # 15 GiB twice are 75% of the large device's memory and do not fit the plain one
    needs = Needs(creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 15.0), ("b", 15.0)), sizes=(1,))
    demands = [demand("a", 100.0), demand("b", 100.0)]
    together, _ = solve_and_check(Milp(), problem(demands, [(LARGE, 1)], needs, BUDGET))
    assert [len(list(gpu.replicas())) for gpu in together.gpus] == [2]
    apart, _ = solve_and_check(Milp(), problem(demands, [(plain_device(), 1)], needs, BUDGET))
    assert len(apart.unplaced) == 1


def test_no_more_replicas_than_the_demand_allows() -> None:
    needs = Needs(creq=(("m", 40.0),), gib=(("m", 2.0),), sizes=(1,))  # one replica serves 333 requests/s
    capped = demand("m", 900.0)
    free, _ = solve_and_check(Milp(), problem([capped], [(plain_device(), 3)], needs, BUDGET))
    assert free.unplaced == ()
    limited, _ = solve_and_check(
        Milp(), problem([replace(capped, max_replicas=2)], [(plain_device(), 3)], needs, BUDGET)
    )
    assert sum(1 for gpu in limited.gpus for _ in gpu.replicas()) == 2
    assert limited.unplaced[0].rate_rps == pytest.approx(900.0 - 2000.0 / 3.0)


def test_a_replica_that_would_break_an_slo_goes_to_a_gpu_that_the_program_left_empty() -> None:
    # 3 ms alone, 6 beside the other, 5 are allowed: the program, which does not see it, needs one GPU for both
    needs = Needs(slowdown=1.0, creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(1,))
    demands = [demand("a", 10.0, 5.0), demand("b", 10.0, 5.0)]
    placement, _ = solve_and_check(Milp(), problem(demands, [(LARGE, 1), (plain_device(), 1)], needs, BUDGET))
    assert sorted(len(list(gpu.replicas())) for gpu in placement.gpus) == [1, 1]
    assert placement.unplaced == ()
