from __future__ import annotations

import random

import pytest

from gpuprof.rules.routing import RESERVE
from gpuprof.serving.router.reserve import Reserve


@pytest.mark.parametrize(("percentile", "spread"), [(99.0, 0.08), (95.0, 0.1), (99.0, 0.05)])
def test_of_what_is_let_in_at_the_limit_as_many_are_late_as_the_percentile_allows(
    percentile: float, spread: float
) -> None:
    draw = random.Random(1)
    reserve = Reserve(percentile)
    late = 0
    for number in range(40_000):
        expected_ms = 500.0 * (1.0 - reserve.part)
        took_ms = expected_ms * draw.lognormvariate(0.0, spread)
        late += took_ms > 500.0 and number >= 20_000
        reserve.observe(expected_ms, took_ms, 500.0)
    assert late / 20_000 == pytest.approx(1.0 - percentile / 100.0, rel=0.3)
    assert reserve.part > RESERVE


def test_it_falls_back_to_the_least_where_expectations_hold_and_is_bounded_where_nothing_does() -> None:
    reserve = Reserve(99.0)
    for _ in range(200):
        reserve.observe(450.0, 5000.0, 500.0)
    assert reserve.part == pytest.approx(0.3)
    for _ in range(3000):
        reserve.observe(350.0, 350.0, 500.0)
    assert reserve.part == RESERVE


def test_requests_that_were_far_from_their_deadline_say_nothing() -> None:
    reserve = Reserve(99.0)
    for _ in range(100):
        reserve.observe(10.0, 40.0, 500.0)
    assert reserve.part == RESERVE
