from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuprof.profiling.worker import tasks
from gpuprof.profiling.worker.job import TimingLimits
from gpuprof.profiling.worker.tasks import Effort, Resident, WorkerSetup, pause_in_batches
from tests.profiling.models import write_mlp
from tests.profiling.requests import QUICK, a_job

LIMITS = TimingLimits(precision=0.0, min_repeats=6, min_time_s=2.0)


@pytest.mark.parametrize("count", [7, 15, 115, 150])
def test_however_many_pauses_there_are_they_are_spread_as_gaps_between_random_requests(count: int) -> None:
    pauses = sorted(pause_in_batches(number) for number in range(count))
    assert 0.8 * tasks._MEAN_PAUSE < sum(pauses) / count <= tasks._MEAN_PAUSE
    for part in (0.25, 0.5, 0.75):
        below = sum(pause < -tasks._MEAN_PAUSE * math.log1p(-part) for pause in pauses) / count
        assert below == pytest.approx(part, abs=1.0 / count)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses slept, on a clock that they move."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


def _resident(given: list[Any], durations_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> Resident:
    resident = Resident(WorkerSetup())
    resident._run_on = given.append
    moments = [0]
    for duration in durations_ns:
        moments += [moments[-1], moments[-1] + duration]
    readings = iter(moments[1:])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(readings))
    return resident


def test_pauses_end_once_their_mean_is_precise_enough(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    precise = TimingLimits(precision=0.02, min_repeats=6, min_time_s=100.0)
    feeds = {"x": np.arange(4.0)}
    durations = _resident(given, [10, 10, 10, 10, 10, 10], monkeypatch).time_pauses(feeds, 1e7, precise)
    assert durations == [10] * 6
    assert clock[:3] == pytest.approx([0.0208, 0.0086, 0.0416], abs=1e-4)
    assert all(inputs["x"] is not feeds["x"] and np.array_equal(inputs["x"], feeds["x"]) for inputs in given)
    assert given[0]["x"] is not given[1]["x"]  # no cache holds what is given next


def test_pauses_that_scatter_end_with_the_time_and_are_short_for_long_batches(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = _resident([], [1, 9] * 20, monkeypatch).time_pauses({"x": np.zeros(1)}, 5e9, LIMITS)
    assert len(durations) == 8 and clock == [0.25] * 8


def test_the_memory_of_a_batch_size_is_its_own_whatever_ran_before(tmp_path: Path) -> None:
    """A worker keeps nothing of a large model that the next, smaller one would seem to need, or not to need."""
    resident = Resident(WorkerSetup())
    large, small = (a_job(write_mlp(tmp_path / f"{width}.onnx", width=width, layers=4)) for width in (2048, 512))
    peaks = []
    for job in (small, large, small):
        resident.load(job.path, job.inputs(), 0.0)
        peaks.append(resident.time(QUICK).memory_held_bytes)
    first, most, again = peaks
    assert most > 4 * 2048**2 * 4 * 0.9
    assert again == pytest.approx(first, rel=0.3, abs=3e6)


def test_timing_ends_by_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, now = Resident(WorkerSetup()), [0.0]

    def run() -> dict[str, Any]:
        now[0] += 0.1
        return {}

    resident._run = run
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(now[0] * 1e9))
    steady = TimingLimits(min_time_s=0.5, want_repeats=50, want_time_s=2.0, max_time_s=10.0)
    assert len(resident.time(steady).latencies_ns) in range(20, 24)  # the wanted time
    assert Effort(time_s=1.0, min_repeats=3, max_repeats=5).repeat(run) == [100_000_000] * 5
    exact = TimingLimits(precision=-1.0, min_time_s=0.5, want_time_s=1.0, max_time_s=4.0)
    assert len(resident.time(exact).latencies_ns) in range(40, 42)  # never precise enough
