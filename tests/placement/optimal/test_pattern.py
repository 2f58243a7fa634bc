import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.mig import is_legal
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import pattern as pattern_module
from gpuprof.placement.optimal.candidates import CandidateSegments
from gpuprof.placement.optimal.cutting_stock import CuttingStock
from gpuprof.placement.optimal.local_search import PartitionPlanner
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.pattern import PartitionSlot, PatternPacker, best_packing, list_configurations, multisets
from gpuprof.placement.optimal.restricted_master import RestrictedMaster, solve_relaxation
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segment, Segments
from tests.placement.table import LaunchBound

WHOLE = ("plain", None)


def slots(*percents: float) -> tuple[PartitionSlot, ...]:
    return tuple(PartitionSlot(Share(percent)) for percent in percents)


def test_too_many_contents_are_not_listed_and_the_first_ones_are_within_the_whole() -> None:
    packer = PatternPacker(WHOLE, slots(*(2.5 * n for n in range(1, 41))))
    assert packer.list_maximal() is None
    for pattern in packer.initial_patterns():
        assert sum(slot.share.sm_pct * count for slot, count in pattern.slots) <= 100.0 + 1e-9


def test_nearly_equal_shares_by_the_dozen_do_not_take_for_ever() -> None:
    assert PatternPacker(WHOLE, slots(*(8.0 + 0.001 * n for n in range(40)))).list_maximal() is None


def test_cuts_are_legal_layouts_of_the_instances_asked_for_and_the_whole() -> None:
    device = sliced_device()
    configurations = list_configurations(device, [Share(100.0, "3g.40gb"), Share(50.0, "1g.10gb"), Share(50.0)])
    assert all(is_legal(device, configuration.layout) for configuration in configurations)
    assert {item.profile.name for configuration in configurations for item in configuration.layout} == {
        "3g.40gb",
        "1g.10gb",
    }
    assert [configuration.partitions() for configuration in configurations if not configuration.layout] == [
        {("sliced", None): 1}
    ]


def test_a_device_without_mig_is_cut_in_no_other_way() -> None:
    assert [configuration.layout for configuration in list_configurations(plain_device(), [Share(50.0)])] == [()]


@given(
    drawn=st.lists(st.tuples(st.integers(15, 100), st.integers(0, 5)), min_size=1, max_size=4, unique=True),
    memory=st.integers(1, 9),
)
def test_with_memory_they_are_all_maximal_combinations(drawn: list[tuple[int, int]], memory: int) -> None:
    sizes = [(PartitionSlot(Share(float(percent)), held), percent, held) for percent, held in drawn if held <= memory]
    packer = PatternPacker(WHOLE, tuple(slot for slot, _, _ in sizes), memory)
    patterns = packer.list_maximal()
    expected = set()
    for counts in product(range(7), repeat=len(sizes)):
        space = 100 - sum(n * percent for n, (_, percent, _) in zip(counts, sizes, strict=True))
        free = memory - sum(n * held for n, (_, _, held) in zip(counts, sizes, strict=True))
        if min(space, free) >= 0 and not any(percent <= space and held <= free for _, percent, held in sizes):
            expected.add(frozenset((slot, n) for n, (slot, _, _) in zip(counts, sizes, strict=True) if n))
    assert patterns is not None
    assert {frozenset(pattern.slots) for pattern in patterns} == (expected if sizes else set())
    assert len(patterns) == len(expected if sizes else ())
    if sizes:
        values = {slot: 1.0 + 0.1 * number for number, slot in enumerate(packer.slots)}
        _, value = packer.best_pattern(values)
        assert value == pytest.approx(max(sum(n * values[slot] for slot, n in chosen) for chosen in expected))


@given(
    items=st.lists(st.tuples(st.integers(3, 12), st.floats(-1.0, 9.0)), min_size=1, max_size=3),
    capacity=st.integers(1, 20),
)
def test_it_is_as_good_as_trying_everything(items: list[tuple[int, float]], capacity: int) -> None:
    sizes, values = [size for size, _ in items], [value for _, value in items]
    counts, value = best_packing(sizes, values, capacity)
    every = [
        taken
        for taken in product(*(range(capacity // size + 1) for size in sizes))
        if sum(n * size for n, size in zip(taken, sizes, strict=True)) <= capacity
    ]
    best = max(sum(n * worth for n, worth in zip(taken, values, strict=True)) for taken in every)
    assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= capacity
    assert sum(n * worth for n, worth in zip(counts, values, strict=True)) == pytest.approx(value)
    assert value == pytest.approx(best)
    assert multisets(sizes, capacity) == len(every)


PRICES = {"plain": 1.0}


def master(percents: list[float]) -> RestrictedMaster:
    """One replica of each model, of so many percent."""
    shares = {f"m{number}": percent for number, percent in enumerate(percents)}
    choices = {
        model: (Segment(model, "plain", Share(percent), 1, 1, 10.0, percent / 100.0, None, 1.0),)
        for model, percent in shares.items()
    }
    return RestrictedMaster([FleetEntry(plain_device())], [demand(model, 10.0) for model in shares], choices)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.integers(2, 30), min_size=2, max_size=7, unique=True))
def test_generated_patterns_bound_as_well_as_listed_ones(steps: list[int]) -> None:
    percents = [2.5 * step for step in steps]
    listed = master(percents)
    solution, bound = solve_relaxation(listed, PRICES, Limit())
    assert solution is not None
    assert bound == pytest.approx(solution.objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern_module, "_MOST_LOOKED_AT", 0)
        generated = master(percents)
        assert generated.generated
        again, generated_bound = solve_relaxation(generated, PRICES, Limit())
    assert again is not None
    assert again.objective == pytest.approx(solution.objective)
    assert generated_bound == pytest.approx(bound, rel=1e-5)


def test_when_the_time_is_up_the_bound_holds_all_the_same() -> None:
    percents = [2.5 * step for step in range(3, 31)]
    unfinished = master(percents)
    assert unfinished.generated
    _, bound = solve_relaxation(unfinished, PRICES, Limit(1e-9))
    _, true = solve_relaxation(master(percents), PRICES, Limit())
    assert 0.0 < bound <= true * (1.0 + 1e-9)
    assert true >= math.fsum(percents) / 100.0 * (1.0 - 1e-6)


BUDGET = Options(latency_budget=0.5)


def _search(given: Problem, most_cost: float = math.inf) -> Placement:
    segments = Segments(given)
    choices = CandidateSegments(given, segments).list_choices()
    gpus = CuttingStock(given, PartitionPlanner(given, segments), choices, Limit()).place(given.demands, most_cost)
    return Placement("", gpus)


def test_alike_demands_take_the_devices_of_their_best_pattern_at_any_number() -> None:
    """Two replicas of half a device each are 20% slower together, three of a third would be late."""
    estimator = LinearEstimator(slowdown=0.2, percents=(25.0, 50.0, 100.0))
    for count in (2, 7, 40):
        given = problem([demand(f"m{i}", 80.0, 60.0) for i in range(count)], estimator=estimator, options=BUDGET)
        patterns = _search(given)
        assert patterns.rates_rps() == pytest.approx({demand.model: 80.0 for demand in given.demands})
        most = max(sum(1 for _ in gpu.replicas()) for gpu in patterns.gpus)
        assert len(patterns.gpus) == -(-count // most)
        assert not _search(given, most_cost=len(patterns.gpus)).gpus


def test_large_demands_share_equal_devices_that_serve_both() -> None:
    """A replica serves 800/s alone under any share, and 667/s beside another: 2700/s take at most five pairs."""
    estimator = LaunchBound(slowdown=0.2)
    given = problem([demand(model, 2700.0, 60.0) for model in "ab"], estimator=estimator, options=BUDGET)
    assert len(_search(given).gpus) <= 5


def test_a_counted_fleet_serves_the_higher_priority_first() -> None:
    estimator = LinearEstimator(slowdown=0.2)
    low, high = demand("low", 900.0, 60.0), demand("high", 500.0, 60.0)
    given = problem([low, replace(high, priority=1)], [(plain_device(), 1)], estimator, BUDGET)
    rates = solve_and_check(Optimal(), given)[0].rates_rps()
    assert rates["high"] == pytest.approx(500.0) and rates.get("low", 0.0) < 900.0


def test_neighbours_that_slow_each_other_down_are_parted_in_the_final_map() -> None:
    """One replica a device serves the whole demand; four of a quarter each would be late beside one another."""
    estimator = LinearEstimator(slowdown=0.5, percents=(25.0, 100.0))
    given = problem([demand("m", 1500.0, 40.0)], estimator=estimator)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == ()
    assert all(sum(1 for _ in gpu.replicas()) <= 2 for gpu in placement.gpus)
