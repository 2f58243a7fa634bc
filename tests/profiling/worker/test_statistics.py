from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.profiling.worker.statistics import is_median_known, median_interval, percentile, summarize


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
