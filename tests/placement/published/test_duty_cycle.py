"""Models that take turns on a device: the equations of the duty cycle, and gpulet with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpuprof.domain.deployment import Replica
from gpuprof.placement.contract import LinearEstimator, demand, evidence, problem, solve_and_check
from gpuprof.placement.feasibility import check
from gpuprof.placement.problem import Options
from gpuprof.placement.published.gpulet import DutyCycle, Gpulet, TurnDemand, list_duty_cycles

TIMES = {1: 3.0, 2: 4.0, 4: 6.0, 8: 10.0}
LOW_RATES = [demand(f"m{number}", 2.0, 200.0) for number in range(9)]


def test_a_cycle_holds_a_batch_of_what_comes_in_it_of_each_model() -> None:
    # In 40 ms come 4 of a and 2 of b, 6 and 4 ms; a's SLO of 40 ms leaves a cycle of 34 ms. In 20 ms come 2 and 1, 4
    # and 3 ms. In 80 ms come 8 and 4, 10 and 6 ms, and 40 - 10 ms are left. In 10 ms come 1 and a half, 3 and 3 ms.
    cycles = list_duty_cycles([TurnDemand(100.0, 40.0, TIMES), TurnDemand(50.0, 40.0, TIMES)])
    assert [(cycle.cycle_ms, cycle.batches) for cycle in cycles] == [
        (34.0, (4, 2)),
        (20.0, (2, 1)),
        (30.0, (8, 4)),
        (10.0, (1, 1)),
    ]
    assert [cycle.busy for cycle in cycles] == pytest.approx([10 / 34, 7 / 20, 16 / 30, 6 / 10])


def test_the_slo_holds_a_cycle_and_a_batch_of_ones_own_and_no_less() -> None:
    # batches of one: a cycle of 3 + 3 ms, and 3 ms of its own
    just, too_tight = ([TurnDemand(100.0, slo, TIMES)] * 2 for slo in (9.0, 8.9))
    assert list_duty_cycles(just) == (DutyCycle(6.0, (1, 1), 1.0),)
    assert list_duty_cycles(too_tight) == ()


def test_rates_that_fill_more_than_all_the_time_have_no_cycle() -> None:
    # batches of eight serve 800/s of a device's whole time: two models of 400/s fit, two of 401/s do not
    fits, exceeds = ([TurnDemand(rate, 1e6, TIMES)] * 2 for rate in (400.0, 401.0))
    assert [cycle.batches for cycle in list_duty_cycles(fits)] == [(8, 8)]
    assert list_duty_cycles(exceeds) == ()


def test_models_of_low_rates_take_turns_in_one_part_of_a_device() -> None:
    given = problem(LOW_RATES, estimator=LinearEstimator(slowdown=1.0))
    placement, deployment = solve_and_check(Gpulet(temporal=True), given)
    assert placement.unplaced == () and len(placement.gpus) == 1
    (partition,) = deployment.nodes[0].gpus[0].partitions
    assert not partition.unshared
    groups = {(replica.turns, replica.sm_share_pct) for replica in partition.replicas}
    assert len(groups) <= 2 and math.fsum(share for _, share in groups) <= 100.0
    assert len(solve_and_check(Gpulet(), given)[0].gpus) == 5


def test_under_a_latency_budget_a_batch_is_in_time_after_one_of_each_of_the_others() -> None:
    given = problem(LOW_RATES, estimator=LinearEstimator(slowdown=0.5), options=Options(latency_budget=0.5))
    _, deployment = solve_and_check(Gpulet(temporal=True), given)
    groups: dict[int, list[Replica]] = {}
    for *_, replica in deployment.places():
        groups.setdefault(replica.turns, []).append(replica)
    turns = [group for number, group in groups.items() if number and len(group) > 1]
    assert turns
    for group in turns:
        cycle_ms = math.fsum(member.predicted.latency_ms for member in group)
        for member in group:
            assert cycle_ms < 0.5 * given.demand(member.model).slo.latency_ms
            assert member.rate_rps * cycle_ms <= 1000.0 * member.batch * (1.0 + 1e-9)


def test_what_slows_neighbours_down_is_no_matter_for_those_who_take_turns() -> None:
    demands = [demand(f"m{number}", 2.0, 300.0) for number in range(3)]
    given = problem(demands, estimator=LinearEstimator(slowdown=50.0))
    placement, deployment = solve_and_check(Gpulet(temporal=True), given)
    assert len(placement.gpus) == 1 and {replica.turns for *_, replica in deployment.places()} == {1}
    assert len(solve_and_check(Gpulet(), given)[0].gpus) == 3


def test_nobody_takes_turns_where_a_cycle_is_longer_than_an_slo() -> None:
    # A batch of one takes 3 ms; waiting for another's, p99 is above 8.
    given = problem([demand(f"m{number}", 50.0, 8.0) for number in range(3)], estimator=LinearEstimator(slowdown=5.0))
    placement, deployment = solve_and_check(Gpulet(temporal=True), given)
    assert len(placement.gpus) == 3
    assert "turns" not in deployment.to_json()


def test_memory_ends_how_many_take_turns() -> None:
    given = problem(LOW_RATES, estimator=LinearEstimator(slowdown=0.1, memory_bytes=5 * 2**30))  # three in 16 GiB
    placement, _ = solve_and_check(Gpulet(temporal=True), given)
    assert [len(list(gpu.replicas())) for gpu in placement.gpus] == [3, 3, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sm_share_pct": 60.0}, "it must be one"),
        ({"processes": 2}, "each must be one process of one model"),
    ],
)
def test_the_check_refuses_turns_that_cannot_be_taken(change: dict[str, object], said: str) -> None:
    given = problem(LOW_RATES[:3])
    _, deployment = solve_and_check(Gpulet(temporal=True), given)
    node, gpu, partition, first = next(iter(deployment.places()))
    assert first.turns == 1
    replicas = (first.model_copy(update=change), *partition.replicas[1:])
    changed = partition.model_copy(update={"replicas": replicas})
    nodes = (node.model_copy(update={"gpus": (gpu.model_copy(update={"partitions": (changed,)}),)}),)
    broken = deployment.model_copy(update={"nodes": nodes})
    complete = evidence(given)
    for facts in (complete, replace(complete, estimator=None)):
        assert any(said in str(violation) for violation in check(broken, facts))
