"""Every policy counts what serving costs: its map is sound, and promises no more than the machine can do."""

from __future__ import annotations

import pytest

from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options
from gpuprof.rules.host_work import HostWork

HOST = HostWork(handover_ms=0.5, host_ms=1.0, host_cores=4)
POLICIES = ("optimal", "ffd", "milp", "igniter", "gslice", "usher", "gpulet")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rate_rps", [20.0, 150.0, 400.0])
def test_the_map_of_every_policy_is_sound_with_it(name: str, rate_rps: float) -> None:
    demands = [demand("a", rate_rps, 60.0), demand("b", rate_rps / 2, 80.0)]
    given = problem(demands, [(plain_device(), 1)], LinearEstimator(), Options(host=HOST))
    placement, deployment = solve_and_check(make_policy(name), given)
    for *_, replica in deployment.places():
        assert replica.batch_latency_ms is not None
        assert replica.rate_rps < 1000.0 * replica.batch * replica.processes / replica.batch_latency_ms[-1]
    calm, _ = solve_and_check(make_policy(name), problem(demands, [(plain_device(), 1)], LinearEstimator(), Options()))
    served, without = (sum(shortfall.rate_rps for shortfall in plan.unplaced) for plan in (placement, calm))
    assert served >= without - 1e-6
