"""The worked examples of Elvinger's thesis, §5.4, on its own profiles (Table 5.2 and A.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.errors import InputError
from gpuprof.placement.contract import ExponentialQueue, evidence, plain_device, problem, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.milp import Milp
from gpuprof.placement.published.usher import Usher, balanced_groups
from tests.placement.table import TabledEstimator
from tests.published_measurements import thesis_estimator, v100

WITHIN_A_GROUP = "alexnet gpt2 resnet50 t5"
ACROSS_GROUPS = "resnet50 vgg19 mobilenet_v2 gpt2 bert"
MULTIPLIER = "resnet50 alexnet mobilenet_v2 bert"


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
    ],
)
def test_the_goodput_of_the_thesis_examples(
    policy: Policy, models: str, rate_rps: float, slo_ms: float, goodput_rps: float
) -> None:
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


def test_six_devices_serve_the_vision_models_of_section_6_2_1() -> None:
    placement, _ = solve_and_check(
        Usher(), thesis("alexnet densenet121 efficientnet_b7 resnet50 vgg19", 500.0, 200.0, None)
    )
    assert len(placement.gpus) == 6
    assert [model for model, _ in replicas(placement)].count("efficientnet_b7") == 2


def test_with_wsm_four_devices_serve_what_takes_six_by_occupancy() -> None:
    # thesis §6.2.1: models share devices only when Creq is the SM utilisation
    vision = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"
    placement, deployment = solve_and_check(Milp(creq="wsm"), thesis(vision, 500.0, 200.0, 4))
    assert deployment.predicted.goodput_rps == pytest.approx(2500.0, abs=0.01)
    assert max(len(list(gpu.replicas())) for gpu in placement.gpus) > 1


@pytest.mark.parametrize("metric", ["max-occupancy", "wsm"])
@pytest.mark.parametrize("ablation", ["", "CM", "WD", "S"])
def test_every_ablation_gives_a_sound_map(
    metric: Literal["max-occupancy", "wsm"], ablation: Literal["", "CM", "WD", "S"]
) -> None:
    solve_and_check(Usher(creq=metric, without=ablation), thesis(ACROSS_GROUPS, 100.0, 300.0, None))


@pytest.mark.parametrize("ablation", ["", "CM", "WD", "S"])
def test_by_average_occupancy_devices_lack_time(
    ablation: Literal["", "CM", "WD", "S"],
) -> None:
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
    assert replicas(fixed).count(("efficientnet_b7", 8)) == 2
    assert deployment.predicted.goodput_rps == pytest.approx(2500.0)


def test_what_serves_everything_is_not_left_out_where_there_are_too_many_configurations() -> None:
    models = "alexnet densenet121 efficientnet_b7 mobilenet_v2"
    placement = Usher(creq="wao").place(thesis(models, 20_000.0, 400.0, 400))
    assert sum(placement.rates_rps().values()) == pytest.approx(80_000.0)


def test_the_best_order_of_the_demands_is_found_where_that_is_asked_for() -> None:
    given = thesis(ACROSS_GROUPS, 400.0, 300.0)
    by_order = [
        sum(Usher().place(replace(given, demands=tuple(order))).rates_rps().values())
        for order in (given.demands, given.demands[::-1])
    ]
    placement, _ = solve_and_check(Usher(orders=12), given)
    assert sum(placement.rates_rps().values()) >= max(by_order)
    assert placement.found_by is not None and placement.found_by.startswith("the best of 12 orders of the demands")
    assert Usher(orders=12).place(given) == placement
    with pytest.raises(InputError, match="orders must be at least 1 but got 0"):
        Usher(orders=0).place(given)
