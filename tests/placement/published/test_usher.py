"""The worked examples of Elvinger's thesis, §5.4, on its own profiles (Table 5.2 and A.1)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import parse_map
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_sources import summarize_map
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import (
    ExponentialQueue,
    LinearEstimator,
    demand,
    evidence,
    plain_device,
    problem,
    solve_and_check,
)
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.milp import Milp, Requirement
from gpuprof.placement.published.usher import (
    FreeCapacity,
    OpenedDevices,
    Option,
    Trial,
    Usher,
    balanced_groups,
    order_models,
    pair_opposites,
)
from gpuprof.placement.segment import Segment
from tests.placement.table import TabledEstimator
from tests.published_measurements import thesis_estimator, v100

WITHIN_A_GROUP = "alexnet gpt2 resnet50 t5"
ACROSS_GROUPS = "resnet50 vgg19 mobilenet_v2 gpt2 bert"
MULTIPLIER = "resnet50 alexnet mobilenet_v2 bert"
CHEAP = FleetEntry(plain_device("cheap", 1.0), None)


def thesis(models: str, rate_rps: float, slo_ms: float, gpus: int | None = 4) -> Problem:
    return Problem(
        demands=tuple(Demand(model, rate_rps, Slo(slo_ms)) for model in models.split()),
        fleet=Fleet((FleetEntry(v100(), gpus),)),
        estimator=thesis_estimator(),
        queueing=ExponentialQueue(),
        options=Options(latency_budget=1.0),
    )


def replicas(placement: Placement) -> list[tuple[str, int]]:
    return sorted((replica.model, replica.batch) for gpu in placement.gpus for replica in gpu.replicas())


@pytest.mark.parametrize(
    ("policy", "models", "rate_rps", "slo_ms", "goodput_rps"),
    [
        (Usher(), WITHIN_A_GROUP, 400.0, 200.0, 800.0),
        (Milp(), WITHIN_A_GROUP, 400.0, 200.0, 1092.04),
        (Usher(), ACROSS_GROUPS, 400.0, 300.0, 793.57),
        (Milp(), ACROSS_GROUPS, 400.0, 300.0, 1331.19),
        (Usher(), MULTIPLIER, 500.0, 200.0, 1500.0),
        (Milp(), MULTIPLIER, 500.0, 200.0, 1624.88),
        (Milp(unshared=True), WITHIN_A_GROUP, 400.0, 200.0, 1092.04),
        (Milp(unshared=True), ACROSS_GROUPS, 400.0, 300.0, 1331.19),
        (Milp(unshared=True), MULTIPLIER, 500.0, 200.0, 1624.88),
    ],
)
def test_goodput_of_the_thesis(policy: Policy, models: str, rate_rps: float, slo_ms: float, goodput_rps: float) -> None:
    _, deployment = solve_and_check(policy, thesis(models, rate_rps, slo_ms))
    assert deployment.predicted.goodput_rps == pytest.approx(goodput_rps, abs=0.01)


def test_the_placements_of_figure_5_8() -> None:
    usher, _ = solve_and_check(Usher(), thesis(WITHIN_A_GROUP, 400.0, 200.0))
    assert replicas(usher) == [("resnet50", 32), ("t5", 8), ("t5", 8), ("t5", 8)]
    milp, _ = solve_and_check(Milp(), thesis(WITHIN_A_GROUP, 400.0, 200.0))
    assert replicas(milp) == [("alexnet", 4), ("resnet50", 4), ("t5", 16), ("t5", 16)]


def test_the_groups_of_the_second_example() -> None:
    # thesis §5.4.1: bert, resnet50 and gpt2 in the first, vgg19 and mobilenet_v2 in the second
    estimator, device = thesis_estimator(), v100()
    means = {}
    for model in ACROSS_GROUPS.split():
        rows = [
            (estimate.creq("max_occupancy"), estimate.memory_bytes)
            for batch in estimator.batches(model, device, next(iter(estimator.shares(model, device))))
            if (estimate := estimator.estimate(model, device, batch, estimator.shares(model, device)[0]))
        ]
        creq = [figure.value for figure, _ in rows if figure is not None]
        mreq = [100.0 * memory.value / device.dram_bytes for _, memory in rows if memory is not None]
        means[model] = (sum(creq) / len(creq), sum(mreq) / len(mreq))
    assert balanced_groups(means, 4) == (("resnet50", "gpt2", "bert"), ("vgg19", "mobilenet_v2"))


def test_with_wsm_four_devices_serve_what_takes_six_by_occupancy() -> None:
    # thesis §6.2.1: models share devices only when Creq is the SM utilisation
    vision = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"
    placement, deployment = solve_and_check(Milp(creq="wsm"), thesis(vision, 500.0, 200.0, 4))
    assert deployment.predicted.goodput_rps == pytest.approx(2500.0, abs=0.01)
    assert max(len(list(gpu.replicas())) for gpu in placement.gpus) > 1


@pytest.mark.parametrize("metric", ["max-occupancy", "wsm"])
@pytest.mark.parametrize("ablation", ["", "CM", "WD", "S"])
def test_ablations_are_sound(metric: Literal["max-occupancy", "wsm"], ablation: Literal["", "CM", "WD", "S"]) -> None:
    solve_and_check(Usher(creq=metric, without=ablation), thesis(ACROSS_GROUPS, 100.0, 300.0, None))


@pytest.mark.parametrize("ablation", ["", "CM", "WD", "S"])
def test_by_average_occupancy_devices_lack_time(ablation: Literal["", "CM", "WD", "S"]) -> None:
    # thesis §6.2: WAO lets models share devices whose SMs they keep busy all the time
    given = thesis(ACROSS_GROUPS, 100.0, 300.0, None)
    broken = check(to_map(given, Usher(creq="wao", without=ablation).place(given)), evidence(given))
    assert broken and all("of the device's time" in violation.message for violation in broken)


def test_without_compute_requirements_it_says_what_to_profile() -> None:
    for policy in (Usher(), Milp()):
        given = problem([Demand("m", 1.0, Slo(10.0))], [(plain_device(), 1)])
        bare = Problem(given.demands, given.fleet, TabledEstimator({}), given.queueing)
        with pytest.raises(InputError, match="no model of the demands has a compute requirement by max-occupancy"):
            policy.place(bare)


def test_the_program_needs_to_know_how_many_devices_there_are() -> None:
    with pytest.raises(InputError, match="milp maximises the goodput of a fixed fleet"):
        Milp().place(thesis(WITHIN_A_GROUP, 400.0, 200.0, None))


def test_a_fixed_fleet_with_devices_to_spare_is_used_as_an_elastic_one_is() -> None:
    # §6.2.1: two efficientnet_b7 of batch 8 rather than four of batch 4, which serve as much on two GPUs more
    vision = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"
    elastic, _ = solve_and_check(Usher(), thesis(vision, 500.0, 200.0, None))
    fixed, deployment = solve_and_check(Usher(), thesis(vision, 500.0, 200.0, 6))
    assert replicas(fixed) == replicas(elastic)
    assert len(fixed.gpus) == len(elastic.gpus) == 6
    assert replicas(fixed).count(("efficientnet_b7", 8)) == 2
    assert deployment.predicted.goodput_rps == pytest.approx(2500.0)


def test_what_serves_everything_is_not_left_out_where_there_are_too_many_configurations() -> None:
    models = "alexnet densenet121 efficientnet_b7 mobilenet_v2"
    placement = Usher(creq="wao").place(thesis(models, 20_000.0, 400.0, 400))
    assert sum(placement.rates_rps().values()) == pytest.approx(80_000.0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-60, 60), min_size=2, max_size=13))
def test_pairs_of_opposites_weigh_as_much_as_the_least_matching(surpluses: list[int]) -> None:
    graph = networkx.Graph()
    for first, second in combinations(range(len(surpluses)), 2):
        graph.add_edge(first, second, weight=abs(surpluses[first] + surpluses[second]))
    weights = [
        sum(abs(surpluses[first] + surpluses[second]) for first, second in pairs)
        for pairs in (pair_opposites(surpluses), networkx.min_weight_matching(graph))
    ]
    assert len({index for pair in pair_opposites(surpluses) for index in pair}) == len(surpluses) // 2 * 2
    assert weights[0] == weights[1]


def test_a_thousand_models_are_grouped_with_their_opposites() -> None:
    # half of them need 10% more compute than memory, half the opposite
    models = {f"m{index}": (20.0, 10.0) if index % 2 else (10.0, 20.0) for index in range(1001)}
    groups = balanced_groups(models, 4)
    assert sorted(model for group in groups for model in group) == sorted(models)
    assert [len(group) for group in groups].count(4) == 250
    assert all(sum(models[m][0] - models[m][1] for m in group) == 0.0 for group in groups if len(group) == 4)


def requirement(creq: float, mreq: float, goodput_rps: float = 100.0, device: str = "cheap") -> Requirement:
    segment = Segment("m", device, Share(creq), 4, 1, goodput_rps, creq / 100.0, 0, 10.0)
    return Requirement(segment, creq, mreq)


def option(model: str, creq: float, mreq: float, replicas: int = 1, device: str = "cheap") -> Option:
    requirements = {device: requirement(creq, mreq, device=device)}
    return Option(Demand(model, 100.0, Slo(100.0)), 4, replicas, requirements)


def names(options: list[Option]) -> list[str]:
    return [option.demand.model for option in options]


MIXED = [
    option("c-small", 20.0, 10.0),
    option("m-large", 30.0, 60.0),
    option("neutral", 44.0, 40.0),
    option("c-large", 60.0, 30.0),
    option("m-small", 10.0, 20.0),
    option("c-mid", 40.0, 20.0),
]


def test_compute_and_memory_heavy_models_take_turns_each_by_falling_need_and_neutral_ones_come_last() -> None:
    assert names(order_models(MIXED)) == ["c-large", "m-large", "c-mid", "m-small", "c-small", "neutral"]


@pytest.mark.parametrize(
    ("creq", "mreq", "leaning"), [(12.0, 10.0, "compute"), (10.0, 12.0, "memory"), (11.9, 10.0, ""), (10.0, 11.9, "")]
)
def test_a_model_is_heavy_from_a_ratio_of_1_2(creq: float, mreq: float, leaning: str) -> None:
    assert option("m", creq, mreq).leaning == leaning


def test_without_classes_only_the_need_counts_and_without_sorting_the_order_given() -> None:
    assert names(order_models(MIXED, "CM")) == ["m-large", "c-large", "neutral", "c-mid", "c-small", "m-small"]
    assert names(order_models(MIXED, "S")) == names(MIXED)


def test_replicas_of_a_model_stand_on_different_devices() -> None:
    trial = Trial(OpenedDevices([CHEAP], [FreeCapacity("cheap")]))
    trial.place(option("m", 10.0, 10.0, replicas=3))
    assert [index for _, index in trial.hosts] == [0, 1, 2]
    assert trial.cost == 2.0


@dataclass(frozen=True)
class Needs(LinearEstimator):
    """Compute (at batch 1) and memory by model, and times that do not depend on the share."""

    creq: tuple[tuple[str, float], ...] = ()
    gib: tuple[tuple[str, float], ...] = ()

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        compute, memory = dict(self.creq)[model], dict(self.gib)[model]
        return Estimate(
            Workload(model, batch, share, processes),
            device.name,
            Figure((2.0 + batch) * (1.0 + self.slowdown * len(beside)), MEASURED),
            memory_bytes=Figure(memory * 2**30, MEASURED),
            creq_pct=(("max_occupancy", Figure(compute, MEASURED)),),
        )


def together(placement: Placement) -> list[list[str]]:
    return sorted(sorted(replica.model for replica in gpu.replicas()) for gpu in placement.gpus)


def test_compute_heavy_models_share_devices_with_memory_heavy_ones() -> None:
    # 16 GiB a device: two of a kind exceed a device in one resource, one of each fills it in both
    needs = Needs(
        creq=(("c1", 70.0), ("c2", 70.0), ("m1", 25.0), ("m2", 25.0)),
        gib=(("c1", 4.0), ("c2", 4.0), ("m1", 11.0), ("m2", 11.0)),
    )
    demands = [demand(name, 10.0) for name in ("c1", "c2", "m1", "m2")]
    placement, _ = solve_and_check(Usher(), problem(demands, estimator=needs, options=Options(latency_budget=0.5)))
    assert together(placement) == [["c1", "m1"], ["c2", "m2"]]


def test_a_replica_that_would_break_an_slo_gets_a_device_of_its_own_where_there_is_one() -> None:
    needs = Needs(slowdown=1.0, creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(1,))
    demands = [demand("a", 10.0, 10.0), demand("b", 10.0, 10.0)]  # 3 ms alone, 6 beside the other, 5 are allowed
    elastic = problem(demands, estimator=needs, options=Options(latency_budget=0.5))
    placement, _ = solve_and_check(Usher(), elastic)
    assert together(placement) == [["a"], ["b"]]
    assert placement.unplaced == ()
    fixed = problem(demands, [(plain_device(), 1)], needs, Options(latency_budget=0.5))
    placement, _ = solve_and_check(Usher(), fixed)
    assert [shortfall.model for shortfall in placement.unplaced] == ["b"]
    assert "no place was found" in placement.unplaced[0].reason


def test_a_replica_that_would_break_an_slo_goes_to_another_kind_where_its_own_is_used_up() -> None:
    needs = Needs(slowdown=1.0, creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(1,))
    demands = [demand("a", 10.0, 10.0), demand("b", 10.0, 10.0)]
    fleet = [(plain_device(), 1), (plain_device("other", 2.0), 1)]
    placement, _ = solve_and_check(Usher(), problem(demands, fleet, needs, Options(latency_budget=0.5)))
    assert {gpu.device: [replica.model for replica in gpu.replicas()] for gpu in placement.gpus} == {
        "plain": ["a"],
        "other": ["b"],
    }


def test_heterogeneous_devices_are_bought_by_their_price() -> None:
    needs = Needs(creq=(("small", 10.0), ("big", 30.0)), gib=(("small", 3.0), ("big", 20.0)))
    large = replace(plain_device("large", 5.0), dram_bytes=40 * 2**30)
    given = problem(
        [demand("small", 10.0), demand("big", 10.0)],
        [(large, None), (plain_device("little", 1.0), None)],
        needs,
        Options(latency_budget=0.5),
    )
    placement, deployment = solve_and_check(Usher(), given)
    # both are memory-heavy; big comes first and fits the large one only, beside which small costs nothing more
    assert together(placement) == [["big", "small"]]
    assert deployment.predicted.cost_per_hour == 5.0
    alone = replace(given, demands=(demand("small", 10.0),))
    assert [gpu.device for gpu in Usher().place(alone).gpus] == ["little"]


def test_a_fixed_fleet_serves_as_much_as_it_can() -> None:
    needs = Needs(creq=(("a", 60.0), ("b", 60.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(4,))
    # one replica serves 4 / 6 ms = 667 requests/s
    given = problem([demand("a", 600.0), demand("b", 600.0)], [(plain_device(), 1)], needs, Options(latency_budget=1.0))
    placement, _ = solve_and_check(Usher(), given)
    assert sum(placement.rates_rps().values()) == pytest.approx(600.0)
    assert len(placement.unplaced) == 1


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


def test_the_cores_of_a_cpu_cannot_be_unshared() -> None:
    given = replace(TWO, fleet=Fleet((FleetEntry(replace(plain_device(), kind="cpu"), 1),)))
    for policy in (Milp(unshared=True), Usher(unshared=True)):
        with pytest.raises(InputError, match="cannot leave plain unshared"):
            policy.place(given)
    _, deployment = solve_and_check(Milp(unshared=True), TWO)
    assert "held to cores" in str(check(deployment, evidence(given))[0])


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
