from __future__ import annotations

from dataclasses import replace

from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.pattern_enumeration import PatternEnumeration
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments

CPU = replace(plain_device("cpu"), kind="cpu", compute_units=8)
BUDGET = Options(latency_budget=1.0)


def list_patterns(given: Problem, seconds: float | None = None) -> tuple[ReplicaPattern, ...] | None:
    segments = Segments(given)
    return PatternEnumeration(
        given, given.demands, segments, PartitionPlanner(given, segments), Limit(seconds)
    ).list_patterns()


def make_problem(
    rates: list[float], slo_ms: float, slowdown: float, **known: tuple[float, ...] | tuple[int, ...]
) -> Problem:
    estimator = LinearEstimator(slowdown=slowdown, **known)  # type: ignore[arg-type]
    return problem([demand(f"m{i}", rate, slo_ms) for i, rate in enumerate(rates)], [(CPU, None)], estimator, BUDGET)


def test_every_combination_of_what_fits_into_a_room_is_listed() -> None:
    patterns = list_patterns(make_problem([1e9, 1e9], 1e6, 0.0, sizes=(1,), percents=(50.0, 100.0)))
    assert patterns is not None
    found = sorted(tuple((one.model, one.share.sm_pct) for one in pattern.partition.replicas) for pattern in patterns)
    halves = [(("m0", 50.0),), (("m0", 50.0), ("m0", 50.0)), (("m0", 50.0), ("m1", 50.0)), (("m1", 50.0),)]
    wholes = [(("m0", 100.0),), (("m1", 100.0),)]
    assert found == sorted([*halves, (("m1", 50.0), ("m1", 50.0)), *wholes])


def test_what_stands_together_serves_what_it_can_beside_the_others() -> None:
    patterns = list_patterns(make_problem([1e9], 1e6, 1.0, sizes=(1,), percents=(50.0, 100.0)))
    assert patterns is not None
    rates = {tuple(one.share.sm_pct for one in s.partition.replicas): s.rates()["m0"] for s in patterns}
    alone = 1000.0 / (3.0 / 0.5)
    assert rates[(50.0,)] == alone
    assert rates[50.0, 50.0] == 2 * alone / 2.0  # each is twice as slow beside the other


def test_neighbours_under_whom_an_slo_breaks_are_left_out() -> None:
    patterns = list_patterns(make_problem([1e9], 7.0, 0.5, sizes=(1,), percents=(50.0, 100.0)))
    assert patterns is not None
    assert all(len(pattern.partition.replicas) == 1 for pattern in patterns)


def test_too_many_combinations_are_not_listed() -> None:
    percents = tuple(float(pct) for pct in range(1, 101))
    assert list_patterns(make_problem([1e9] * 4, 1e6, 0.1, percents=percents)) is None


def test_nothing_is_listed_when_the_time_is_up() -> None:
    small = make_problem([1e9], 1e6, 0.0, sizes=(1,), percents=(50.0, 100.0))
    assert list_patterns(small) is not None
    assert list_patterns(small, seconds=0.0) is None


def test_the_bound_without_neighbours_does_not_exceed_the_map_with_them() -> None:
    # alone, half a device serves 166 requests/s; beside another, 111, and no two shares of a device more than 222
    placement, _ = solve_and_check(Optimal(), make_problem([160.0, 160.0], 1e6, 0.5, sizes=(1,), percents=(50.0,)))
    assert len(placement.gpus) == 2
    assert placement.lower_bound_gpus == 1  # the patterns of the bound hold shares alone
