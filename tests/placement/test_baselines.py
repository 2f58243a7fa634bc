"""gpulet, with its duty cycles, and the policies that are compared with gpuprof's."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprof
from bench.baselines.alpaserve import AlpaServe
from bench.baselines.mig_serving import MigServing
from bench.baselines.paris_elsa import ParisElsa
from bench.baselines.shepherd import Shepherd
from gpuprof.domain.deployment import Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.host_work import HostWork
from gpuprof.domain.share import Share
from gpuprof.pipeline.problem import PlanningOptions
from gpuprof.placement.contract import (
    LinearEstimator,
    demand,
    evidence,
    plain_device,
    problem,
    sliced_device,
    solve_and_check,
)
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.gpulet import DutyCycle, Gpulet, TurnDemand, list_duty_cycles
from tests.placement.table import TabledEstimator

BUDGET = Options(latency_budget=0.5)
HOST = HostWork(handover_ms=0.5, host_ms=1.0, host_cores=4)
POLICIES = ("optimal", "ffd", "milp", "igniter", "gslice", "usher", "gpulet")


def test_gpulet_puts_two_workloads_on_a_gpu_and_gives_the_second_all_that_is_left() -> None:
    # by falling rate: batch 4 under 50% takes 12 ms for 333/s, under 40% 15 ms for 267/s
    given = problem([demand("first", 250.0, 40.0), demand("second", 20.0, 40.0)], options=BUDGET)
    placement, _ = solve_and_check(Gpulet(), given)
    shares = [(replica.model, replica.share.sm_pct) for gpu in placement.gpus for replica in gpu.replicas()]
    assert len(placement.gpus) == 1
    assert shares[0][0] == "first"
    assert shares[1] == ("second", 100.0 - shares[0][1])


def test_gpulet_passes_over_a_batch_that_is_listed_and_refused() -> None:
    # of two batches at half a GPU the larger was measured; the smaller one is listed, and ruled out where it is asked
    estimator = TabledEstimator({Workload("m", 4, Share(50.0)): 400.0})
    given = replace(problem([demand("m", 300.0, 40.0)], options=BUDGET), estimator=_Listing(estimator.throughput_rps))
    placement, _ = solve_and_check(Gpulet(), given)
    assert [replica.batch for gpu in placement.gpus for replica in gpu.replicas()] == [4]


class _Listing(TabledEstimator):
    """Lists a batch that it refuses."""

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1, *super().batches(model, device, share))


def test_gpulet_never_has_more_than_two_partitions_on_a_gpu() -> None:
    placement, _ = solve_and_check(Gpulet(), problem([demand(f"m{i}", 2.0, 200.0) for i in range(9)]))
    assert max(len(list(gpu.replicas())) for gpu in placement.gpus) == 2
    assert len(placement.gpus) == 5


def test_gpulet_does_not_put_together_what_cannot_bear_each_other() -> None:
    estimator = LinearEstimator(slowdown=5.0)
    placement, _ = solve_and_check(
        Gpulet(), problem([demand("a", 50.0, 40.0), demand("b", 50.0, 40.0)], estimator=estimator)
    )
    assert len(placement.gpus) == 2


def test_gpulet_that_regards_no_neighbours_puts_them_together_and_its_map_says_what_it_breaks() -> None:
    given = problem([demand("a", 50.0, 40.0), demand("b", 50.0, 40.0)], estimator=LinearEstimator(slowdown=5.0))
    placement = Gpulet(aware=False).place(given)
    assert len(placement.gpus) == 1
    assert check(to_map(given, placement), evidence(given))


def test_mig_serving_takes_the_most_useful_configuration_first() -> None:
    table = TabledEstimator(
        {
            Workload(model, 1, Share(100.0, profile), 1): rate
            for model, rates in {"a": (50.0, 400.0), "b": (60.0, 100.0)}.items()
            for profile, rate in zip(("1g.10gb", "7g.80gb"), rates, strict=True)
        }
    )
    given = problem([demand("a", 400.0, 60.0), demand("b", 60.0, 60.0)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(MigServing(), replace(given, estimator=table))
    # seven slices score 1 for all of b and something for 300 of a, a whole GPU for a scores 1; the missing 100 then
    # get a whole GPU, the overallocation that ParvaGPU (SC'24 §IV-B2) sees in it
    assert [len(gpu.partitions) for gpu in placement.gpus] == [7, 1]
    assert placement.unplaced == ()


def test_optimal_needs_no_more_than_any() -> None:
    demands = [demand(f"m{i}", 120.0 + 40.0 * i, 50.0) for i in range(5)]
    given = problem(demands, [(sliced_device(), None)], options=BUDGET)
    best = len(solve_and_check(Optimal(), given)[0].gpus)
    for policy in (Gpulet(), MigServing(), Shepherd(), AlpaServe(), ParisElsa()):
        assert best <= len(solve_and_check(policy, given)[0].gpus), policy


def test_shepherd_gives_each_device_to_the_model_that_gains_most_from_it() -> None:
    # A whole device takes 10 ms for a batch of eight: 800/s. After the first device a has 100/s left, b all its 150.
    demands = [demand("a", 900.0, 60.0), demand("b", 150.0, 60.0)]
    placement, _ = solve_and_check(Shepherd(), problem(demands, [(plain_device(), 2)], options=BUDGET))
    assert [
        [(replica.model, replica.batch, replica.rate_rps) for replica in gpu.replicas()] for gpu in placement.gpus
    ] == [[("a", 8, 800.0)], [("b", 8, 150.0)]]
    assert {shortfall.model: shortfall.rate_rps for shortfall in placement.unplaced} == pytest.approx({"a": 100.0})
    assert len(solve_and_check(Shepherd(), problem(demands, options=BUDGET))[0].gpus) == 3


def test_alpaserve_puts_the_model_with_most_unserved_on_the_device_that_is_used_least() -> None:
    # Batches of eight under 25, 50, 100% serve 200, 400, 800/s: c takes a device, then a half of the other, then b.
    demands = [demand("a", 300.0), demand("b", 200.0), demand("c", 500.0)]
    placement, _ = solve_and_check(AlpaServe(), problem(demands, [(plain_device(), 2)], options=BUDGET))
    assert [{(replica.model, replica.share.sm_pct) for replica in gpu.replicas()} for gpu in placement.gpus] == [
        {("c", 100.0)},
        {("a", 50.0), ("b", 25.0)},
    ]


@pytest.mark.parametrize(("slo_ms", "profile", "count"), [(200.0, "1g.10gb", 3), (60.0, "2g.20gb", 2)])
def test_paris_takes_the_smallest_instance_that_the_batch_at_its_knee_suits(
    slo_ms: float, profile: str, count: int
) -> None:
    # Of all sizes the knee is a batch of four, 667 a second of a whole device: 86/s in one slice, 173/s in two. Within
    # 30 ms one slice holds no more than a batch of one, 43/s.
    given = problem([demand("m", 200.0, slo_ms)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(ParisElsa(), given)
    replicas = [replica for gpu in placement.gpus for replica in gpu.replicas()]
    assert [replica.share.mig for replica in replicas].count(profile) == count - (profile == "2g.20gb")
    assert len(replicas) == count
    assert {replica.batch for replica in replicas if replica.share.mig == profile} == {4}


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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("unprofiled")
    return [gpuprof.build_model(name, folder / f"{name}.onnx") for name in ("random_cnn", "mlp")]


@pytest.mark.parametrize("policy", ["usher", "milp"])
def test_a_policy_by_requirements_places_files_that_nobody_profiled(policy: str, files: list[Path]) -> None:
    demands = [gpuprof.Demand(str(file), rate_rps=50.0, slo=gpuprof.Slo(200.0)) for file in files]
    plan = gpuprof.place(demands, fleet="v100:2", policy=policy, options=PlanningOptions(latency_budget=0.5))
    assert plan.is_complete
    for row in plan.rows():
        assert row["creq_metric"] == "max_occupancy"
        low, value, high = (float(str(row[f"creq_{name}"])) for name in ("low_pct", "pct", "high_pct"))
        assert 0.0 <= low <= value <= high <= 100.0
        assert float(str(row["share_pct"])) == pytest.approx(2.5 * round(float(str(row["share_pct"])) / 2.5))
        assert float(str(row["share_pct"])) >= value - 1e-6
        least, needed, most = (float(str(row[f"mreq_{name}"])) for name in ("low_bytes", "bytes", "high_bytes"))
        assert 0.0 < least <= needed <= most
    for *_, replica in plan.deployment.places():
        assert replica.predicted.mreq is not None and replica.predicted.mreq.interval_bytes is not None
        # a guess is planned at its upper end, and is no limit that a process could be ended by
        assert replica.predicted.memory_bytes == pytest.approx(replica.predicted.mreq.interval_bytes[1], abs=2.0)
        assert replica.memory_limit_bytes is None


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
        ({"time_slice_ms": 1.0}, "all must have the same time slice, or none"),
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
