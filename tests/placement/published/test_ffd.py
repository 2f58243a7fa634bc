import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.placement import bin as bins
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.problem import Options
from gpuprof.placement.published import ffd
from gpuprof.placement.published.ffd import FirstFitDecreasing

FFD = FirstFitDecreasing()


def test_small_demands_share_a_device() -> None:
    placement, _ = solve_and_check(FFD, problem([demand(f"m{i}", 5.0, 200.0) for i in range(4)]))
    assert len(placement.gpus) == 1


def test_an_infeasible_slo_names_the_least_that_works() -> None:
    placement, _ = solve_and_check(FFD, problem([demand("m", 10.0, 2.0)]))
    reason = placement.unplaced[0].reason
    # the whole device takes 3 ms for a batch of one, and little waits in a replica that is nearly idle
    assert "on plain a nearly idle replica already takes 3.14 ms at percentile 99, above the SLO of 2 ms" in reason
    assert "the least SLO that works is 3.14 ms" in reason


def test_of_an_slo_whose_part_for_batches_is_too_short_the_part_is_named_and_no_percentile() -> None:
    placement, _ = solve_and_check(FFD, problem([demand("m", 10.0, 4.0)], options=Options(latency_budget=0.5)))
    reason = placement.unplaced[0].reason
    assert "on plain the shortest batch takes 3 ms, and 50% of the SLO are 2 ms; the least SLO that works is" in reason
    assert "percentile" not in reason


def test_a_model_without_room_names_its_need() -> None:
    placement, _ = solve_and_check(FFD, problem([demand("m")], estimator=LinearEstimator(memory_bytes=20 * 2**30)))
    assert placement.unplaced[0].reason == "it needs 20 GiB at the least and plain has 16 GiB"


def test_a_full_fleet_names_the_largest_rate_that_works_and_that_rate_does() -> None:
    fleet = [(plain_device(), 1)]
    placement, _ = solve_and_check(FFD, problem([demand("m", 5000.0)], fleet))
    reason = placement.unplaced[0].reason
    largest = float(reason.split("the largest rate that this policy is known to place is ")[1].split()[0])
    assert placement.rate_rps("m") >= largest > 100.0
    again, _ = solve_and_check(FFD, problem([demand("m", largest)], fleet))
    assert again.unplaced == ()


def test_a_demand_that_finds_the_fleet_taken_says_so() -> None:
    demands = [Demand("first", 5000.0, Slo(100.0), priority=1), demand("second", 10.0)]
    placement, _ = solve_and_check(FFD, problem(demands, [(plain_device(), 1)]))
    assert [shortfall.model for shortfall in placement.unplaced] == ["first", "second"]
    assert placement.unplaced[1].reason.startswith("no place was found for it on 1 plain")


def test_the_higher_priority_is_served() -> None:
    demands = [demand("low", 400.0), Demand("high", 400.0, Slo(100.0), priority=5)]
    placement, _ = solve_and_check(FFD, problem(demands, [(plain_device(), 1)]))
    assert placement.rate_rps("high") == 400.0


def test_when_the_cheaper_kind_is_used_up_the_other_takes_over() -> None:
    dear, cheap = plain_device("dear", 10.0), plain_device("cheap", 1.0)
    placement, _ = solve_and_check(FFD, problem([demand("m", 1500.0)], [(dear, None), (cheap, 1)]))
    assert placement.unplaced == ()
    assert [gpu.device for gpu in placement.gpus].count("cheap") == 1


def test_a_rate_beyond_any_count_is_refused_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bins, ffd):  # ten thousand take half a minute to check
        monkeypatch.setattr(module, "MOST_REPLICAS", 100)
    placement, _ = solve_and_check(FFD, problem([demand("m", 1e13)]))
    assert "largest rate that this policy is known to place" in placement.unplaced[0].reason
    assert len(placement.gpus) == 100


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    asked=st.lists(st.tuples(st.floats(0.1, 3000.0), st.floats(1.0, 300.0)), min_size=1, max_size=6),
    counts=st.tuples(st.none() | st.integers(1, 3), st.none() | st.integers(1, 3)),
    slowdown=st.sampled_from([0.0, 0.2]),
    confidence=st.sampled_from([None, 0.9]),
)
def test_any_demands_and_fleet_give_a_sound_map_or_a_reason(
    asked: list[tuple[float, float]], counts: tuple[int | None, int | None], slowdown: float, confidence: float | None
) -> None:
    demands = [demand(f"m{i}", rate, slo) for i, (rate, slo) in enumerate(asked)]
    fleet = [(plain_device(), counts[0]), (sliced_device(), counts[1])]
    options = Options(confidence=confidence, max_processes=2)
    given_problem = problem(demands, fleet, LinearEstimator(slowdown=slowdown), options)
    placement, deployment = solve_and_check(FFD, given_problem)
    assert all(shortfall.reason for shortfall in placement.unplaced)
    whole = {demand.model for demand in demands} - {shortfall.model for shortfall in placement.unplaced}
    for model in whole:  # at most one percent of the requests may be late
        predicted = deployment.models[model].predicted
        assert predicted is not None
        assert (predicted.p99_ms or 0.0) <= given_problem.demand(model).slo.latency_ms * (1 + 1e-6)
