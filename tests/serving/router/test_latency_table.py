"""Estimates of batch times and the reserve: near what is seen, and at the prediction again when all is quiet."""

from __future__ import annotations

import random

import pytest

from gpuprof.rules.routing import LARGEST_RESERVE, LEAST_RESERVE, RESERVE
from gpuprof.serving.router.served_model import Reserve
from gpuprof.serving.router.served_replica import LatencyTable

PREDICTED = (10.0, 12.0, 14.0, 16.0)


def table() -> LatencyTable:
    return LatencyTable(4, PREDICTED)


def test_what_is_seen_all_the_time_is_expected_for_its_size_and_moves_the_others_along() -> None:
    latencies = table()
    for number in range(400):
        latencies.observe(1 + 3 * (number % 2), 15.0 if number % 2 == 0 else 24.0, number / 20.0)
    assert latencies.times_ms(20.0) == pytest.approx([15.0, 18.0, 21.0, 24.0], rel=0.02)


def test_sizes_may_be_off_the_prediction_by_different_factors() -> None:
    latencies = table()
    for number in range(2000):
        latencies.observe(1 + 3 * (number % 2), 10.0 if number % 2 == 0 else 20.0, number / 20.0)
    times = latencies.times_ms(100.0)
    assert (times[0], times[3]) == pytest.approx((10.0, 20.0), rel=0.05)


def test_a_batch_during_which_the_worker_was_stopped_hardly_counts() -> None:
    latencies = table()
    latencies.observe(4, 1000.0, 1.0)
    assert max(now / then for now, then in zip(latencies.times_ms(1.0), PREDICTED, strict=True)) < 1.12


def test_where_nothing_is_seen_any_more_the_prediction_comes_back_within_ten_seconds() -> None:
    latencies = table()
    for number in range(200):
        latencies.observe(4, 64.0, number / 50.0)
    assert latencies.times_ms(4.0)[3] == pytest.approx(64.0, rel=0.1)
    assert latencies.times_ms(14.0) == pytest.approx(PREDICTED, rel=0.06)


def test_the_small_batches_that_still_run_correct_the_large_ones_that_do_not() -> None:
    latencies = table()
    for number in range(200):
        latencies.observe(4, 64.0, number / 50.0)
    for number in range(200):
        latencies.observe(1, 10.0, 4.0 + number / 20.0)
    assert latencies.times_ms(14.0)[3] < 1.1 * PREDICTED[3]


def test_what_was_not_predicted_is_what_was_seen_first_and_follows() -> None:
    latencies = LatencyTable(4)
    assert list(latencies.times_ms(0.0)) == [0.0] * 4
    latencies.observe(2, 10.0, 0.0)
    assert list(latencies.times_ms(0.0)) == [10.0, 10.0, 15.0, 20.0]
    for number in range(600):
        latencies.observe(2, 30.0, number / 50.0)
    assert latencies.times_ms(30.0)[1] == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize(("percentile", "spread"), [(99.0, 0.08), (95.0, 0.1), (99.0, 0.05), (99.0, 0.01)])
def test_of_what_is_let_in_at_the_limit_as_many_are_late_as_the_percentile_allows(
    percentile: float, spread: float
) -> None:
    draw = random.Random(1)
    reserve = Reserve(percentile)
    late = 0
    for number in range(40_000):
        now = number / 1000.0
        expected_ms = 500.0 * (1.0 - reserve.at(now))
        took_ms = expected_ms * draw.lognormvariate(0.0, spread)
        late += took_ms > 500.0 and number >= 20_000
        reserve.observe(expected_ms, took_ms, 500.0, now)
    assert late / 20_000 == pytest.approx(1.0 - percentile / 100.0, rel=0.3)


def test_it_falls_to_the_least_where_expectations_hold_and_is_bounded_where_nothing_does() -> None:
    reserve = Reserve(99.0)
    for _ in range(200):
        reserve.observe(450.0, 5000.0, 500.0, 1.0)
    assert reserve.at(1.0) == pytest.approx(LARGEST_RESERVE)
    for _ in range(4000):
        reserve.observe(350.0, 330.0, 500.0, 1.0)
    assert reserve.at(1.0) == LEAST_RESERVE


def test_what_a_pause_has_raised_comes_back_by_itself_within_half_a_minute() -> None:
    reserve = Reserve(99.0)
    for number in range(200):
        reserve.observe(450.0, 5000.0, 500.0, number / 100.0)
    assert reserve.at(2.1) == pytest.approx(LARGEST_RESERVE, rel=0.1)
    assert reserve.at(30.0) < RESERVE + 0.02


def test_what_is_always_needed_is_kept() -> None:
    reserve = Reserve(99.0)
    for number in range(20 * 300):  # for five minutes every twentieth batch would be late with less than a quarter
        now = number / 20.0
        took_ms = 500.0 if number % 20 == 0 else 300.0
        reserve.observe(500.0 * (1.0 - reserve.at(now)), took_ms * (1.0 - reserve.at(now)) * 1.33, 500.0, now)
    assert reserve.at(300.0) > 0.18
