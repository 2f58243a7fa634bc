from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.map_sources import describe_basis
from gpuprof.domain.share import Share
from gpuprof.estimators.wrappers import IntervalEndEstimator
from gpuprof.pipeline.place import add_interval_ends
from gpuprof.pipeline.problem import plan_map
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem

#: A batch of 8 takes 10 ms, which serves 800 requests/s; 5 ms at the lower, 15 ms at the upper end.
UNSURE = LinearEstimator(interval=0.5, source="roofline")


def make_problem(time_limit_s: float | None = None) -> Problem:
    options = Options(latency_budget=1.0, time_limit_s=time_limit_s)
    return problem([demand("m", 1500.0, 100.0)], estimator=UNSURE, options=options)


@pytest.mark.slow
def test_a_plan_on_estimates_says_what_it_comes_to_at_both_of_their_ends() -> None:
    planned = plan_map(make_problem(), Optimal())
    predicted = add_interval_ends(make_problem(), Optimal(), planned, Limit()).predicted
    assert predicted.gpus == 3  # 533 requests/s each at the upper end
    assert predicted.at_lower_ends is not None and predicted.at_upper_ends is not None
    assert (predicted.at_lower_ends.gpus, predicted.at_lower_ends.lower_bound_gpus) == (1, 1)
    assert (predicted.at_upper_ends.gpus, predicted.at_upper_ends.lower_bound_gpus) == (3, 3)
    assert predicted.at_upper_ends.served_rps == pytest.approx(1500.0)
    on_means = replace(make_problem(), options=Options(latency_budget=1.0, confidence=0.0))
    assert plan_map(on_means, Optimal()).predicted.gpus == 2


@pytest.mark.parametrize("source", ["measured", "interpolated"])
def test_nothing_is_planned_again_where_everything_was_observed(source: str) -> None:
    class CountingOptimal(Optimal):
        def place(self, problem: Problem) -> Placement:
            raise AssertionError("planned again")

    sure = replace(make_problem(), estimator=LinearEstimator(interval=0.5, source=source))
    planned = plan_map(sure, Optimal())
    assert add_interval_ends(sure, CountingOptimal(), planned, Limit()) == planned


def test_with_the_time_used_up_a_plan_on_upper_ends_still_says_what_it_is_there() -> None:
    planned = plan_map(make_problem(), Optimal())
    predicted = add_interval_ends(make_problem(), Optimal(), planned, Limit(0.0)).predicted
    assert predicted.at_lower_ends is None
    assert predicted.at_upper_ends is not None
    assert (predicted.at_upper_ends.gpus, predicted.at_upper_ends.lower_bound_gpus) == (3, 3)
    assert predicted.at_upper_ends.served_rps == pytest.approx(1500.0)
    assert "at the lower ends of the estimates not computed, at the upper ends 3 devices" in describe_basis(
        add_interval_ends(make_problem(), Optimal(), planned, Limit(0.0))
    )


def test_with_the_time_used_up_a_plan_on_means_knows_no_end() -> None:
    on_means = replace(make_problem(), options=Options(latency_budget=1.0, confidence=0.0))
    planned = plan_map(on_means, Optimal())
    predicted = add_interval_ends(on_means, Optimal(), planned, Limit(0.0)).predicted
    assert (predicted.at_lower_ends, predicted.at_upper_ends) == (None, None)


def test_an_end_of_the_intervals_is_a_figure_without_an_interval() -> None:
    for end, time in (("lower", 5.0), ("upper", 15.0)):
        estimate = IntervalEndEstimator(UNSURE, end).estimate("m", plain_device(), 8, Share())  # type: ignore[arg-type]
        assert estimate.latency_ms.value == pytest.approx(time)
        assert (estimate.latency_ms.low, estimate.latency_ms.high) == (None, None)
