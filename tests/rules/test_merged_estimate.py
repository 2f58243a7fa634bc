import math

import pytest

from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, plain_device
from gpuprof.rules.merged_estimate import MergedEstimator, MergedWork

WORK = MergedWork({"a": 30.0, "b": 10.0}, saved_weight_bytes=1000)
LINEAR = LinearEstimator(start_ms=2.0, each_ms=1.0, memory_bytes=4000)
ESTIMATOR = MergedEstimator(LINEAR, {"ab": WORK})


@pytest.mark.parametrize("batch", range(1, 20))
def test_a_batch_is_divided_whole_and_by_the_rates(batch: int) -> None:
    rows = WORK.rows(batch)
    assert sum(rows.values()) == batch
    if batch >= 2:
        assert set(rows) == {"a", "b"}
        assert abs(rows["a"] - (1 + 0.75 * (batch - 2))) <= 1


def test_a_merged_batch_takes_as_long_as_its_models_one_after_the_other() -> None:
    estimate = ESTIMATOR.estimate("ab", plain_device(), 6, Share(50.0))
    assert estimate.latency_ms.value == pytest.approx((2 * 2.0 + 6 * 1.0) / 0.5)
    assert estimate.latency_ms.source == "sum of its models, measured"
    assert estimate.workload == Workload("ab", 6, Share(50.0))


def test_shared_weights_are_held_once() -> None:
    memory = ESTIMATOR.estimate("ab", plain_device(), 2, Share()).memory_bytes
    assert memory is not None
    assert math.floor(memory.value) == 2 * 4000 - 1000


def test_other_models_are_estimated_as_before_and_merged_neighbours_as_their_models() -> None:
    slowed = MergedEstimator(LinearEstimator(slowdown=0.5), {"ab": WORK})
    alone = slowed.estimate("c", plain_device(), 1, Share(50.0)).latency_ms.value
    beside = slowed.estimate("c", plain_device(), 1, Share(50.0), [Workload("ab", 4, Share(50.0))]).latency_ms.value
    assert beside == pytest.approx(2.0 * alone)  # two neighbours, each half as much again
