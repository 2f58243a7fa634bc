"""Tasks of a worker and what they time."""

import math
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.profiling.worker import tasks
from gpuprof.profiling.worker.job import TimingLimits, is_median_known, median_interval, percentile, summarize
from gpuprof.profiling.worker.tasks import Effort, Resident, WorkerSetup, pause_in_batches, session_run
from gpuprof.runtime.outputs import outputs_differ
from gpuprof.runtime.session import open_session
from tests.profiling.models import write_mlp
from tests.profiling.requests import QUICK, a_job
from tests.small_models import write_model

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


def test_scattering_pauses_end_with_the_time_and_are_short(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN])
def test_types_that_numpy_lacks_go_in_and_come_out(tmp_path: Path, kind: int) -> None:
    node, kinds = helper.make_node("Identity", ["x"], ["y"]), {"x": kind, "y": kind}
    path = tmp_path / "same.onnx"
    write_model(path, [node], {"x": ["n", 8]}, {"y": ["n", 8]}, opset=21, ir_version=10, types=kinds)
    given = random_inputs(load_graph(path, 3))
    session = open_session(path, threads=1)
    answer = session_run(session, pickle.loads(pickle.dumps(given)), path)()["y"]
    assert answer.shape == (3, 8)
    assert np.array_equal(answer, given["x"].astype(np.float32))


def test_outputs_agree_within_what_another_order_of_additions_makes() -> None:
    values = np.array([1.0, -2.0, 3.0], np.float32)
    shifted = values + np.eye(3, dtype=np.float32)[2]
    assert outputs_differ({"y": values}, {"y": values * 1.001}) is None
    assert "differs under the share by" in str(outputs_differ({"y": values}, {"y": shifted}))
    assert "not finite" in str(outputs_differ({"y": values}, {"y": np.where(values < 0, np.nan, values)}))
    assert "shape" in str(outputs_differ({"y": values}, {"y": values[:2]}))
    whole = np.array([1, 2])
    assert outputs_differ({"y": whole}, {"y": whole}) is None
    assert "differs under the share" in str(outputs_differ({"y": whole}, {"y": whole + 1}))
    with pytest.raises(InputError, match="different names"):
        outputs_differ({"y": values}, {"z": values})


def test_the_interval_holds_the_median_of_a_skewed_distribution_95_times_in_100() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(1000):
        low, high = median_interval(sorted(draw.expovariate(1.0) for _ in range(51))) or (0.0, 0.0)
        held += low <= 0.6931 <= high
    assert 930 <= held <= 990


def test_fewer_than_six_values_have_no_interval() -> None:
    assert median_interval([1.0] * 5) is None
    assert not is_median_known([1.0] * 5, 0.02)


def test_equal_values_are_known_and_spread_ones_are_not() -> None:
    assert is_median_known([5.0] * 6, 0.02)
    assert not is_median_known(sorted([5.0, 9.0] * 10), 0.02)


def test_percentiles_that_a_sample_cannot_show_are_not_measured() -> None:
    assert summarize([1.0] * 19, 0.02).latency_p95_ms is None
    assert summarize([1.0] * 20, 0.02).latency_p95_ms == 1.0
    assert summarize([1.0] * 99, 0.02).latency_p99_ms is None
    assert summarize([1.0] * 100, 0.02).latency_p99_ms == 1.0


def test_a_neighbour_that_wakes_up_halfway_is_noticed_though_the_interval_is_narrow() -> None:
    quiet, disturbed = [10.0] * 100, [10.0, 10.0, 11.0, 11.0, 11.0] * 20
    assert is_median_known(sorted(quiet + disturbed), 0.02)
    assert not summarize(quiet + disturbed, 0.02).stable
    assert summarize(quiet, 0.02).stable


def test_one_slow_start_does_not_make_a_sample_unstable() -> None:
    assert summarize([50.0] + [10.0] * 100, 0.02).stable


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=200))
def test_figures_are_in_order_and_within_the_sample(values: list[float]) -> None:
    stats = summarize(values, 0.02)
    assert min(values) <= stats.latency_p50_ms <= max(values)
    if stats.latency_p95_ms is not None:
        assert stats.latency_p50_ms <= stats.latency_p95_ms <= (stats.latency_p99_ms or max(values)) <= max(values)
    if stats.latency_p50_low_ms is not None and stats.latency_p50_high_ms is not None:
        assert stats.latency_p50_low_ms <= stats.latency_p50_ms <= stats.latency_p50_high_ms


@pytest.mark.parametrize(("percent", "value"), [(50, 50.5), (75, 75.25), (95, 95.05), (99, 99.01)])
def test_percentiles_are_linear_between_neighbours(percent: int, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], percent) == pytest.approx(value)


def test_a_disturbed_sample_is_unstable() -> None:
    assert not summarize([10.0] * 100, 0.02, undisturbed=False).stable
