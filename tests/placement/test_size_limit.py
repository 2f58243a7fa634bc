from __future__ import annotations

import pytest

from gpuprof.errors import InputError
from gpuprof.pipeline.problem import plan_map
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.policies import make_policy
from gpuprof.placement.search_space import MOST_DEVICES, refuse_oversized

#: 100 requests/s on the whole device at any batch, whatever share.
SLOW = LinearEstimator(start_ms=0.0, each_ms=10.0, interval=0.0)


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
