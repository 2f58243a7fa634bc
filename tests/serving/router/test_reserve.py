from __future__ import annotations

import random

import pytest

from gpuprof.rules.routing import LARGEST_RESERVE, LEAST_RESERVE, RESERVE
from gpuprof.serving.router.reserve import Reserve


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


def test_requests_that_were_far_from_their_deadline_say_nothing() -> None:
    reserve = Reserve(99.0)
    for _ in range(100):
        reserve.observe(10.0, 40.0, 500.0, 1.0)
    assert reserve.at(1.0) == RESERVE


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


def test_the_next_map_may_ask_for_another_percentile() -> None:
    strict, lax = Reserve(99.0), Reserve(99.0)
    lax.percentile = 50.0
    for reserve in (strict, lax):
        for took_ms in (600.0, 300.0) * 20:
            reserve.observe(450.0, took_ms, 500.0, 1.0)
    assert lax.at(1.0) < strict.at(1.0)
