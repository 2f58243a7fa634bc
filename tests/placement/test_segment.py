from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.pipeline.problem import plan_map
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options
from gpuprof.placement.search_space import MOST_DEVICES, refuse_oversized
from gpuprof.placement.segment import Segments

#: 100 requests/s on the whole device at any batch, whatever share.
SLOW = LinearEstimator(start_ms=0.0, each_ms=10.0, interval=0.0)


def test_the_papers_rule_gives_full_throughput_when_a_batch_is_within_its_part_of_the_slo() -> None:
    given = problem([demand("m", 1e6, 20.1)], options=Options(latency_budget=0.5))
    (half, whole) = Segments(given).best(given.demands[0], plain_device())
    # batch 8 takes (2 + 8) / f ms: 10 ms on the whole device; on half of it batch 3, which is not listed, as long
    assert (half.share, half.batch) == (Share(50.0), 3)
    assert half.capacity_rps == pytest.approx(300.0)
    assert (whole.share, whole.batch) == (Share(100.0), 8)
    assert whole.capacity_rps == pytest.approx(800.0)


def test_a_segment_is_not_offered_more_than_its_demand() -> None:
    given = problem([demand("m", 10.0)])
    assert {segment.capacity_rps for segment in Segments(given).best(given.demands[0], plain_device())} == {10.0}


def test_of_equal_capacities_and_tails_the_smallest_batch_and_fewest_processes_win() -> None:
    given = problem([demand("m", 0.01)], options=Options(max_processes=3))
    best = Segments(given).best(given.demands[0], plain_device())
    assert {(segment.batch, segment.processes) for segment in best} == {(1, 1)}


def test_of_equal_capacities_the_shorter_tail_wins() -> None:
    given = problem([demand("m", 120.0)])
    segments, wanted = Segments(given), given.demands[0]
    for share in segments.best(wanted, plain_device()):
        tails = [
            segments.segment_tail_ms(wanted, segment)
            for segment in segments.every(wanted, plain_device())
            if segment.share == share.share and segment.capacity_rps == 120.0
        ]
        assert share.capacity_rps < 120.0 or segments.segment_tail_ms(wanted, share) <= min(tails) * 1.05


def test_a_segment_that_does_not_fit_the_memory_is_no_segment() -> None:
    given = problem(
        [demand("m", 10.0)], estimator=LinearEstimator(memory_bytes=9 * 2**30), options=Options(max_processes=2)
    )
    device = plain_device()
    assert Segments(given).make(given.demands[0], device, Workload("m", 1, Share(), 2)) is None
    assert Segments(given).make(given.demands[0], device, Workload("m", 1, Share(), 1)) is not None


@given(slo=st.floats(5.0, 200.0), rate=st.floats(1.0, 2000.0), looser=st.floats(1.0, 3.0))
def test_a_looser_slo_never_lowers_a_capacity(slo: float, rate: float, looser: float) -> None:
    def capacity(limit_ms: float) -> float:
        given = problem([demand("m", rate, limit_ms)])
        made = Segments(given).make(given.demands[0], plain_device(), Workload("m", 4, Share(50.0)))
        return 0.0 if made is None else made.capacity_rps

    assert capacity(slo * looser) >= capacity(slo)


@given(slo=st.floats(5.0, 200.0), rate=st.floats(1.0, 2000.0))
def test_a_capacity_is_met_and_little_more_is_not(slo: float, rate: float) -> None:
    given = problem([demand("m", rate, slo)])
    segments, wanted, device = Segments(given), given.demands[0], plain_device()
    for segment in segments.every(wanted, device):
        workload = Workload("m", segment.batch, segment.share)
        assert segments.meets(wanted, device, workload, segment.capacity_rps)
        if segment.capacity_rps < rate:
            assert not segments.meets(wanted, device, workload, segment.capacity_rps * 1.02)


def test_a_rate_that_no_plan_of_a_size_serves_is_refused_before_it_is_planned() -> None:
    given = problem([demand("net", 1e7)], estimator=SLOW)
    with pytest.raises(InputError, match="10,000,000 requests/s of net would take at least 100,000 devices") as refused:
        plan_map(given, make_policy("optimal"))
    assert "correct rate_rps" in refused.value.fix


def test_rates_up_to_the_limit_are_planned_and_the_quickest_device_counts() -> None:
    refuse_oversized(problem([demand("net", 100.0 * MOST_DEVICES)], estimator=SLOW))
    with pytest.raises(InputError, match="would take at least 2,001 devices"):
        refuse_oversized(problem([demand("net", 100.0 * (MOST_DEVICES + 1))], estimator=SLOW))


def test_a_fleet_that_is_counted_limits_the_plan_itself() -> None:
    given = problem([demand("net", 1e7)], [(plain_device(), 3)], SLOW)
    planned = plan_map(given, make_policy("ffd"))
    assert planned.predicted.gpus <= 3 and planned.unplaced
