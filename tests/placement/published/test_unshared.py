"""Maps without shares, as Elvinger's thesis serves its MILPs (§6.1.3) and USHER in Figure A.1."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import parse_map
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_sources import summarize_map
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, evidence, plain_device, problem, solve_and_check
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.milp import Milp
from gpuprof.placement.published.usher import Usher
from tests.placement.published.test_usher import ACROSS_GROUPS, MULTIPLIER, WITHIN_A_GROUP, Needs, thesis
from tests.published_measurements import thesis_estimator, v100

BUDGET = Options(latency_budget=1.0)
NEEDS = Needs(creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 2.0), ("b", 2.0)), sizes=(1,))
TWO = problem([demand("a", 100.0), demand("b", 100.0)], [(plain_device(), 1)], NEEDS, BUDGET)


@pytest.mark.parametrize("policy", [Milp(unshared=True), Usher(unshared=True)])
def test_replicas_are_held_to_no_share_and_the_map_says_so(policy: Policy) -> None:
    _, deployment = solve_and_check(policy, TWO)
    (partition,) = deployment.nodes[0].gpus[0].partitions
    assert partition.unshared
    assert [replica.sm_share_pct for replica in partition.replicas] == [100.0, 100.0]
    assert "No replica is held to a share" in summarize_map(deployment)
    assert parse_map(json.loads(deployment.to_json()), "a map") == deployment


@pytest.mark.parametrize("policy", [Milp(), Usher()])
def test_by_default_each_has_a_share_of_what_it_requires(policy: Policy) -> None:
    _, deployment = solve_and_check(policy, TWO)
    (partition,) = deployment.nodes[0].gpus[0].partitions
    assert [replica.sm_share_pct for replica in partition.replicas] == [40.0, 40.0]
    assert "unshared" not in deployment.to_json()
    assert "Unused:" in summarize_map(deployment)


def test_the_cores_of_a_cpu_cannot_be_unshared() -> None:
    given = replace(TWO, fleet=Fleet((FleetEntry(replace(plain_device(), kind="cpu"), 1),)))
    for policy in (Milp(unshared=True), Usher(unshared=True)):
        with pytest.raises(InputError, match="cannot leave plain unshared"):
            policy.place(given)
    _, deployment = solve_and_check(Milp(unshared=True), TWO)
    assert "held to cores" in str(check(deployment, evidence(given))[0])


@pytest.mark.parametrize(
    ("models", "rate_rps", "slo_ms", "goodput_rps"),
    [
        (WITHIN_A_GROUP, 400.0, 200.0, 1092.04),
        (ACROSS_GROUPS, 400.0, 300.0, 1331.19),
        (MULTIPLIER, 500.0, 200.0, 1624.88),
    ],
)
def test_the_thesis_examples_come_out_without_shares(
    models: str, rate_rps: float, slo_ms: float, goodput_rps: float
) -> None:
    _, deployment = solve_and_check(Milp(unshared=True), thesis(models, rate_rps, slo_ms))
    assert deployment.predicted.goodput_rps == pytest.approx(goodput_rps, abs=0.01)


def test_what_neighbours_cost_is_counted_where_it_is_known() -> None:
    # By occupancy both fit one V100; together they keep more SMs busy than there are, so that both take longer.
    estimator = thesis_estimator("database")
    demands = (Demand("resnet50", 300.0, Slo(400.0)), Demand("alexnet", 300.0, Slo(400.0)))
    given = problem(demands, [(v100(), 1)], estimator, replace(BUDGET, confidence=0.0))  # type: ignore[arg-type]
    _, deployment = solve_and_check(Milp(creq="wao", unshared=True), given)
    replicas = list(deployment.nodes[0].gpus[0].partitions[0].replicas)
    assert {replica.model for replica in replicas} == {"alexnet", "resnet50"}
    for replica in replicas:
        alone = estimator.estimate(replica.model, v100(), replica.batch, Share())
        assert replica.predicted.latency_ms >= alone.latency_ms.value
        assert "SM contention" in replica.predicted.source


def test_a_device_is_not_shared_where_somebodys_slo_would_break() -> None:
    estimator = thesis_estimator("database")
    demands = (Demand("resnet50", 900.0, Slo(100.0)), Demand("alexnet", 3000.0, Slo(100.0)))
    given = problem(demands, [(v100(), 1)], estimator, BUDGET)  # type: ignore[arg-type]
    placement, _ = solve_and_check(Milp(creq="wao", unshared=True), given)
    assert placement.unplaced  # by their occupancies both fit; the time that they take from one another is not there
