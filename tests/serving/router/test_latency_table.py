"""Estimates of batch times: near what is seen, hardly moved by one batch, at the prediction again when all is quiet."""

from __future__ import annotations

import pytest

from gpuprof.serving.router.latency_table import LatencyTable

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
