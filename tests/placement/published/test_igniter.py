"""iGniter's published plans, and GSLICE on its workloads."""

from dataclasses import replace
from typing import Any

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import ModelFile
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, IgniterEstimator, WorkloadCoefficients
from gpuprof.lab.scenarios import listed_demands
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
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.gslice import Gslice
from gpuprof.placement.published.igniter import Igniter
from tests.placement.table import TabledEstimator

#: Fitted to iGniter's published profile of a V100, to five digits.
HARDWARE = HardwareCoefficients(300.0, 1530.0, 53.5, 1e7, -1.0254, 0.0047507, -0.0090224)
MODELS = {
    "alexnet": WorkloadCoefficients(
        602110.0, 4000.0, 20, 0.0015884, (4.1535e-05, 0.087116, 0.23736, 0.0005552, 0.34601), 0.0023764,
        (23.893, 37.108), (3.8952, -1.0859),
    ),
    "resnet50": WorkloadCoefficients(
        602110.0, 4000.0, 80, 0.0009227, (-0.00017515, 0.58264, -0.00011862, 0.0034486, 1.9095), 0.0021631,
        (162.34, 4.6269), (24.672, -1.8534),
    ),
    "vgg19": WorkloadCoefficients(
        602110.0, 4000.0, 29, 0.0013534, (-4.8346e-05, 1.5819, 0.44452, 0.0018841, 0.92619), 0.0020177,
        (536.73, 2.0819), (43.934, 2.5239),
    ),
    "ssd": WorkloadCoefficients(
        1080000.0, 2968900.0, 93, 0.0015901, (0.0002516, 2.3585, -0.16782, 0.0026427, 3.417), 0.0022809,
        (644.89, 2.3393), (89.664, -0.4276),
    ),
}  # fmt: skip


def igniters(example: tuple[dict[str, str], tuple[Demand, ...]], count: int | None = None) -> Problem:
    models, demands = example
    return Problem(
        demands=demands,
        fleet=Fleet((FleetEntry(plain_device("v100", 3.06), count),)),
        estimator=IgniterEstimator(
            None, coefficients={"v100": (HARDWARE, {name: MODELS[model] for name, model in models.items()})}
        ),
        queueing=ExponentialQueue(),
        options=Options(latency_budget=0.5),
        files={name: ModelFile(None, model) for name, model in models.items()},
    )


def plan(placement: Placement) -> list[set[tuple[str, int, float]]]:
    return [{(r.model, r.batch, r.share.sm_pct) for r in gpu.replicas()} for gpu in placement.gpus]


def test_the_plan_of_table_1() -> None:
    placement, _ = solve_and_check(Igniter(), igniters(table_1()))
    assert plan(placement) == [{("alexnet", 4, 10.0), ("resnet50", 8, 30.0), ("vgg19", 6, 37.5)}]


def test_the_twelve_workloads_of_table_3_take_six_devices() -> None:
    placement, _ = solve_and_check(Igniter(), igniters(table_3()))
    shares = {replica.model: replica.share.sm_pct for gpu in placement.gpus for replica in gpu.replicas()}
    together = [{replica.model for replica in gpu.replicas()} for gpu in placement.gpus]
    assert len(placement.gpus) == 6
    # §5.3: W4 with 32.5%, W9 with 37.5% beside W10, W1 beside W5 and W11, W2 with 7.5%
    assert (shares["W4"], shares["W9"], shares["W2"]) == (32.5, 37.5, 7.5)
    assert {"W9", "W10"} in together
    assert {"W1", "W5", "W11"} in together


def test_the_lower_bounds_alone_fit_five_devices_but_break_slos() -> None:
    # FFD+ of §5.3: shares without regard to neighbours; the check sees what they do to each other
    given = igniters(table_3())
    placement = Igniter(aware=False).place(given)
    assert len(placement.gpus) == 5
    assert {violation.rule for violation in check(to_map(given, placement), evidence(given))} == {"slo", "rate"}


def test_copies_of_a_file_are_placed_alike() -> None:
    placement, _ = solve_and_check(Igniter(), igniters(table_3(copies=5)))
    assert placement.unplaced == ()
    assert len(placement.gpus) <= 30


def test_a_workload_too_large_for_a_device_is_split_evenly() -> None:
    placement, _ = solve_and_check(Igniter(), problem([demand("m", 2000.0, 60.0)], options=Options(latency_budget=0.5)))
    rates = [replica.rate_rps for gpu in placement.gpus for replica in gpu.replicas()]
    assert placement.unplaced == ()
    assert len(set(rates)) == 1


def test_the_cheaper_kind_of_device_is_chosen() -> None:
    fleet = [(plain_device("dear", 9.0), None), (plain_device("cheap", 1.0), None)]
    placement, _ = solve_and_check(Igniter(), problem([demand("m", 50.0)], fleet))
    assert {gpu.device for gpu in placement.gpus} == {"cheap"}


class _FailedOnOld(LinearEstimator):
    """Knows of one kind of device only that everything failed there."""

    def estimate(self, model: str, device: Device, *more: Any, **named: Any) -> Estimate:
        if device.name == "old":
            raise InputError(f"{model} is ruled out on old")
        return super().estimate(model, device, *more, **named)


@pytest.mark.parametrize("options", [Options(latency_budget=0.5), Options()])
def test_a_kind_of_device_where_a_model_failed_leaves_the_others(options: Options) -> None:
    fleet = [(plain_device("old", 1.0), None), (plain_device("new", 3.0), None)]
    placement, _ = solve_and_check(Igniter(), problem([demand("a", 20.0)], fleet, _FailedOnOld(), options))
    assert [gpu.device for gpu in placement.gpus] == ["new"]


def test_a_unit_that_is_no_part_of_a_device_is_refused() -> None:
    with pytest.raises(InputError, match="unit_pct must be above 0 and at most 100 but got 0"):
        Igniter(unit_pct=0.0).place(problem([demand("m")]))


def test_where_a_larger_batch_is_asked_for_than_is_known_the_largest_is_taken() -> None:
    # 500/s within 1000 ms fill a batch of 250 in half of the SLO, and no batch above 32 is known.
    loose = ({"alexnet": "alexnet"}, (Demand("alexnet", 500.0, Slo(1000.0)),))
    placement, _ = solve_and_check(Igniter(), igniters(loose))
    (replica,) = (placed for gpu in placement.gpus for placed in gpu.replicas())
    assert (replica.batch, replica.rate_rps) == (32, 500.0)


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


def table_1() -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return the models and demands of §2.3, whose plan Table 1 prints."""
    return _split_models(listed_demands("igniter", "Table1"))


def table_3(copies: int = 1) -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return the models and demands of W1 … W12, each ``copies`` times."""
    return _split_models(listed_demands("igniter", "W12", copies))


def _split_models(demands: tuple[Demand, ...]) -> tuple[dict[str, str], tuple[Demand, ...]]:
    models = {demand.model: demand.source_model or demand.model for demand in demands}
    return models, tuple(replace(demand, source_model=None) for demand in demands)
