from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpuprof.profiling.child import pauses
from gpuprof.profiling.child.pauses import time_after_pauses
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

USUAL_NS = 2_000_000


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_BATCHES_WITHIN_S", ((3, float("inf")), (8, 1.0), (150, 0.05)))


def test_each_batch_follows_a_pause_and_gets_inputs_of_its_own() -> None:
    given: list[Mapping[str, Any]] = []
    ended: list[float] = []
    gaps: list[float] = []

    def run(feeds: Mapping[str, Any]) -> None:
        if ended:
            gaps.append(time.perf_counter() - ended[-1])
        given.append(feeds)
        ended.append(time.perf_counter())

    feeds = {"x": np.arange(4.0)}
    durations = time_after_pauses(run, feeds, USUAL_NS)
    assert len(durations) == len(given) >= 8
    wanted = [min(0.25, pauses._pause_in_batches(number) * USUAL_NS / 1e9) for number in range(1, len(gaps) + 1)]
    assert all(gap >= pause for gap, pause in zip(gaps, wanted, strict=True))
    assert all(one["x"] is not feeds["x"] and np.array_equal(one["x"], feeds["x"]) for one in given)
    assert given[0]["x"] is not given[1]["x"]


@pytest.mark.parametrize("count", [7, 15, 115, 150])
def test_however_many_pauses_there_are_they_are_spread_as_gaps_between_random_requests(count: int) -> None:
    found = sorted(pauses._pause_in_batches(number) for number in range(count))
    assert 0.8 * pauses._MEAN_PAUSE < sum(found) / count <= pauses._MEAN_PAUSE
    for part in (0.25, 0.5, 0.75):
        below = sum(pause < -pauses._MEAN_PAUSE * math.log1p(-part) for pause in found) / count
        assert below == pytest.approx(part, abs=1.0 / count)


def test_the_time_of_the_pause_is_not_counted() -> None:
    durations = time_after_pauses(lambda feeds: None, {"x": np.zeros(1)}, 20_000_000)
    assert sorted(durations)[len(durations) // 2] < 20_000_000


def test_the_pool_of_a_large_input_stays_small() -> None:
    large = {"x": np.zeros(pauses._POOL_BYTES // 8)}
    assert len(pauses._copies(large)) == 2
    assert len(pauses._copies({"x": np.zeros(1)})) == pauses._MAX_COPIES


def test_batches_that_take_long_are_few_and_their_pauses_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_BATCHES_WITHIN_S", ((3, float("inf")), (8, 0.0)))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    durations = time_after_pauses(lambda feeds: None, {"x": np.zeros(1)}, 5_000_000_000)
    assert len(durations) == 3
    assert slept == [0.25] * 3

    slept.clear()
    time_after_pauses(lambda feeds: None, {"x": np.zeros(1)}, 10_000_000)
    assert slept == pytest.approx([0.0208, 0.0086, 0.0416], abs=1e-4)
