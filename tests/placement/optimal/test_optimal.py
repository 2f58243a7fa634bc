from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import BUILTIN, make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.parvagpu import ParvaGpu
from gpuprof.placement.segment import Segments
from tests.placement.table import TabledEstimator

OPTIMAL = Optimal()
BUDGET = Options(latency_budget=0.5, max_processes=3)
FEW = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
ASKED = st.lists(st.tuples(st.floats(0.5, 2500.0), st.floats(8.0, 300.0)), min_size=1, max_size=5)
#: Every policy plans for these, with every batch listed: few and small, so that it takes seconds.
SOME = st.lists(st.tuples(st.floats(0.5, 600.0), st.floats(8.0, 300.0)), min_size=1, max_size=3)


def demands(targets: list[tuple[float, float]]) -> list[Demand]:
    return [demand(f"m{i}", rate, slo) for i, (rate, slo) in enumerate(targets)]


def sum_served_rps(placement: Placement, given: Problem) -> float:
    return sum(placement.rate_rps(demand.model) for demand in given.demands)


def cost(placement: Placement) -> float:
    prices = {"plain": 1.0, "sliced": 4.0, "big": 3.0}
    return sum(prices[gpu.device] for gpu in placement.gpus)


def shares(percents: dict[str, float], rate: float = 100.0) -> TabledEstimator:
    return TabledEstimator({Workload(model, 1, Share(pct), 1): rate for model, pct in percents.items()})


def test_what_first_fit_decreasing_wastes_is_used() -> None:
    # the classic: 35+35+30 twice is two devices, first fit decreasing begins with 35+35 and 30
    percents = {"a": 44.0, "b": 44.0, "c": 28.0, "d": 28.0, "e": 28.0, "f": 28.0}
    given = problem([demand(model, 90.0, 30.0) for model in percents], options=BUDGET)
    given = replace(given, estimator=shares(percents))
    best, _ = solve_and_check(OPTIMAL, given)
    first_fit, _ = solve_and_check(FirstFitDecreasing(), given)
    assert (len(best.gpus), len(first_fit.gpus)) == (2, 3)
    assert best.lower_bound_gpus == 2


def test_a_demand_is_split_into_the_instances_that_leave_no_gap() -> None:
    # 7 × 100 in slices of one beats 4g (350) + 3g (250) + …
    table = TabledEstimator(
        {
            Workload("m", 1, Share(100.0, profile), 1): rate
            for profile, rate in (("1g.10gb", 100.0), ("3g.40gb", 250.0), ("4g.40gb", 350.0), ("7g.80gb", 600.0))
        }
    )
    given = problem([demand("m", 700.0, 40.0)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, replace(given, estimator=table))
    assert len(placement.gpus) == 1
    assert placement.lower_bound_gpus == 1


@pytest.mark.slow
def test_dear_and_cheap_devices_are_mixed_by_what_they_do_for_the_price() -> None:
    fleet = [(plain_device("plain", 1.0), 1), (plain_device("big", 3.0), None)]
    placement, _ = solve_and_check(OPTIMAL, problem([demand("m", 1100.0, 60.0)], fleet, options=BUDGET))
    assert sorted(gpu.device for gpu in placement.gpus) == ["big", "plain"]
    assert placement.lower_bound_cost_per_hour == pytest.approx(4.0)


def test_a_fixed_fleet_serves_as_much_as_can_be() -> None:
    # the whole device does 8 requests in 10 ms: 800 requests/s
    given = problem([demand("m", 5000.0)], [(plain_device(), 2)], options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.rate_rps("m") == pytest.approx(1600.0)
    assert placement.lower_bound_gpus is None


def test_priorities_come_first() -> None:
    fleet = [(plain_device(), 1)]
    demands = [Demand("low", 700.0, Slo(100.0)), Demand("high", 700.0, Slo(100.0), priority=1)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, fleet, options=BUDGET))
    assert placement.rate_rps("high") == pytest.approx(700.0)


def test_below_its_floor_a_demand_gets_nothing() -> None:
    demands = [Demand("all", 1500.0, Slo(100.0), min_goodput_rps=1200.0), demand("some", 300.0)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, [(plain_device(), 1)], options=BUDGET))
    assert placement.rate_rps("all") == 0.0
    assert placement.rate_rps("some") == pytest.approx(300.0)


def test_few_replicas_allowed_cap_what_is_served() -> None:
    demands = [Demand("m", 3000.0, Slo(100.0), max_replicas=2)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, options=BUDGET))
    assert placement.rate_rps("m") == pytest.approx(1600.0)
    assert "max_replicas 2" in placement.unplaced[0].reason


def test_memory_that_shares_do_not_show_opens_another_device() -> None:
    given = problem([demand(f"m{i}", 5.0) for i in range(4)], estimator=LinearEstimator(memory_bytes=5 * 2**30))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert len(placement.gpus) == placement.lower_bound_gpus == 2


def test_shares_too_many_to_list_are_still_packed_with_a_bound() -> None:
    fine = LinearEstimator(percents=tuple(2.5 * n for n in range(1, 41)))
    given = problem([demand(f"m{i}", 60.0 + i, 40.0) for i in range(12)], estimator=fine, options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.unplaced == ()
    assert placement.lower_bound_gpus is not None
    assert placement.lower_bound_gpus <= len(placement.gpus) <= placement.lower_bound_gpus + 1


def test_a_time_limit_still_gives_a_sound_map() -> None:
    wanted = demands([(300.0, 50.0)] * 4)
    given = problem(wanted, options=replace(BUDGET, time_limit_s=1e-6))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.unplaced == ()
    best, _ = solve_and_check(OPTIMAL, problem(wanted, options=BUDGET))
    assert placement.lower_bound_gpus is not None
    assert 0 < placement.lower_bound_gpus <= len(best.gpus)


@pytest.mark.slow
@FEW
@given(asked=ASKED, budget=st.booleans(), slowdown=st.sampled_from([0.0, 0.2]))
def test_it_never_costs_more_than_first_fit_and_no_policy_goes_below_its_bound(
    asked: list[tuple[float, float]], budget: bool, slowdown: float
) -> None:
    options = BUDGET if budget else Options(max_processes=3)
    fleet = [(sliced_device(), None)]
    given = problem(demands(asked), fleet, LinearEstimator(slowdown=slowdown), options)
    best, _ = solve_and_check(OPTIMAL, given)
    assert best.lower_bound_gpus is not None
    for policy in (FirstFitDecreasing(), ParvaGpu()):
        placement, _ = solve_and_check(policy, given)
        if not placement.unplaced and not best.unplaced:
            assert best.lower_bound_gpus <= len(placement.gpus)
            assert slowdown or len(best.gpus) <= len(placement.gpus)


@pytest.mark.slow
@FEW
@given(asked=ASKED, counts=st.tuples(st.integers(1, 2), st.integers(1, 2)), more=st.integers(1, 2))
def test_more_devices_never_lower_the_goodput(
    asked: list[tuple[float, float]], counts: tuple[int, int], more: int
) -> None:
    def goodput(extra: int) -> float:
        fleet = [(plain_device(), counts[0] + extra), (sliced_device(), counts[1])]
        given = problem(demands(asked), fleet, options=BUDGET)
        return sum_served_rps(solve_and_check(OPTIMAL, given)[0], given)

    assert goodput(more) >= goodput(0) * (1.0 - 1e-4)


@pytest.mark.slow
@FEW
@given(asked=ASKED, looser=st.floats(1.0, 3.0), budget=st.booleans())
def test_a_looser_slo_never_costs_more(asked: list[tuple[float, float]], looser: float, budget: bool) -> None:
    options = BUDGET if budget else Options()

    def solution(factor: float) -> Placement:
        scaled = [(rate, slo * factor) for rate, slo in asked]
        return solve_and_check(OPTIMAL, problem(demands(scaled), [(plain_device(), None)], options=options))[0]

    tight, loose = solution(1.0), solution(looser)
    if not tight.unplaced:
        assert cost(loose) <= cost(tight)


@pytest.mark.slow
@FEW
@given(
    asked=ASKED,
    counts=st.tuples(st.none() | st.integers(1, 3), st.none() | st.integers(1, 3)),
    slowdown=st.sampled_from([0.0, 0.3]),
    confidence=st.sampled_from([None, 0.9]),
)
@example(asked=[(2211.0, 8.0)], counts=(None, None), slowdown=0.0, confidence=None)
def test_any_demands_and_fleet_give_a_sound_map_or_a_reason(
    asked: list[tuple[float, float]],
    counts: tuple[int | None, int | None],
    slowdown: float,
    confidence: float | None,
) -> None:
    fleet = [(plain_device(), counts[0]), (sliced_device(), counts[1])]
    options = Options(confidence=confidence, max_processes=2)
    solve_and_check(OPTIMAL, problem(demands(asked), fleet, LinearEstimator(slowdown=slowdown), options))


def test_more_is_never_served_than_the_map_says_any_could() -> None:
    given = problem(demands([(900.0, 60.0), (700.0, 40.0)]), [(plain_device(), 1)])
    placement, deployment = solve_and_check(OPTIMAL, given)
    assert placement.unplaced
    assert deployment.predicted.upper_bound_goodput_rps is not None
    assert deployment.predicted.goodput_rps <= deployment.predicted.upper_bound_goodput_rps < 1600.0


def test_what_still_runs_is_kept_when_rates_change() -> None:
    sure = LinearEstimator(interval=0.0)  # else another map may leave less in doubt, which comes first
    given = problem(demands([(300.0, 50.0), (250.0, 80.0), (120.0, 40.0)]), estimator=sure, options=BUDGET)
    _, before = solve_and_check(OPTIMAL, given)
    less = replace(given, demands=tuple(demands([(280.0, 50.0), (240.0, 80.0), (110.0, 40.0)])))
    fresh, _ = solve_and_check(OPTIMAL, less)
    kept, after = solve_and_check(OPTIMAL, replace(less, previous=before))
    assert cost(kept) == cost(fresh)
    assert after.predicted.moves == 0


@pytest.mark.slow
def test_what_has_no_room_any_more_is_planned_anew_with_few_devices_not_with_all() -> None:
    sure = LinearEstimator(interval=0.0)
    targets = [(250.0, 50.0), (160.0, 80.0), (350.0, 50.0), (190.0, 40.0), (140.0, 40.0), (350.0, 80.0)]
    given = problem(demands(targets), estimator=sure, options=BUDGET)
    _, before = solve_and_check(OPTIMAL, given)
    more = replace(given, demands=tuple(demands([(1.05 * rate, slo) for rate, slo in targets])))
    fresh, _ = solve_and_check(OPTIMAL, more)
    kept, after = solve_and_check(OPTIMAL, replace(more, previous=before))
    devices = {entry.device.name: entry.device for entry in more.fleet.entries}
    assert cost(kept) == cost(fresh)
    assert after.predicted.moves is not None
    assert after.predicted.moves < assign_devices(fresh.gpus, before, devices).moves


def test_small_models_share_an_instance_beside_what_needs_one_of_its_own() -> None:
    # only instances are known: seven of 1g, and nine models that need a seventh of one each
    instances = LinearEstimator(percents=())
    given = problem([demand(f"m{i}", 2.0, 500.0) for i in range(9)], [(sliced_device(), None)], instances, BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert len(placement.gpus) == placement.lower_bound_gpus == 1
    mixed = [part for part in placement.gpus[0].partitions if len({replica.model for replica in part.replicas}) > 1]
    assert all(part.mig for part in placement.gpus[0].partitions)
    assert mixed


@pytest.mark.slow
@settings(FEW, max_examples=4)
@given(
    asked=SOME,
    mig=st.booleans(),
    count=st.none() | st.integers(1, 2),
    table=st.tuples(st.floats(0.2, 8.0), st.floats(0.1, 3.0), st.sampled_from([0.0, 0.25]), st.floats(0.0, 0.4)),
    budget=st.booleans(),
)
def test_no_policy_of_all_is_better_than_the_bounds(
    asked: list[tuple[float, float]],
    mig: bool,
    count: int | None,
    table: tuple[float, float, float, float],
    budget: bool,
) -> None:
    start, each, slowdown, interval = table
    # every batch is listed: the bounds are over the batches that the estimator lists, GSLICE takes any other too
    estimator = LinearEstimator(start, each, slowdown=slowdown, interval=interval, sizes=tuple(range(1, 9)))
    fleet = [(sliced_device() if mig else plain_device(), count)]
    given = problem(demands(asked), fleet, estimator, BUDGET if budget else Options(max_processes=2))
    best, _ = solve_and_check(OPTIMAL, given)
    for name in sorted(set(BUILTIN) - {"optimal"}):
        try:
            placement, deployment = solve_and_check(make_policy(name), given)
        except GpuprofError:
            continue  # not made for such a fleet
        if best.lower_bound_gpus is not None and not placement.unplaced:
            assert best.lower_bound_gpus <= len(placement.gpus), name
        if best.upper_bound_goodput_rps is not None:
            assert deployment.predicted.goodput_rps <= best.upper_bound_goodput_rps * (1.0 + 1e-6), name


@pytest.mark.parametrize("budget", [None, 0.5])
def test_with_confidence_it_plans_as_if_the_upper_ends_were_the_means(budget: float | None) -> None:
    # the interval holds 90% and is half as wide as the value: its upper end is 1.5 times the mean
    wanted = demands([(300.0, 60.0), (90.0, 200.0)])
    careful = problem(
        wanted, estimator=LinearEstimator(interval=0.5), options=Options(confidence=0.9, latency_budget=budget)
    )
    slower = problem(
        wanted,
        estimator=LinearEstimator(start_ms=3.0, each_ms=1.5, interval=0.0),
        options=Options(latency_budget=budget),
    )
    ours, theirs = solve_and_check(OPTIMAL, careful)[0], solve_and_check(OPTIMAL, slower)[0]
    assert len(ours.gpus) == len(theirs.gpus)
    assert ours.lower_bound_gpus == theirs.lower_bound_gpus
    capacities = [
        [segment.capacity_rps for segment in Segments(given).best(wanted[0], plain_device())]
        for given in (careful, slower)
    ]
    assert capacities[0] == pytest.approx(capacities[1], rel=1e-6)
