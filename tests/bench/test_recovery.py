from __future__ import annotations

import pytest

from bench.recovery import WITHIN_S, Disturbance, Recovery, disturbances, recover


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in disturbances() if one.lasts_s <= 5.0], ids=lambda case: case.name)
def test_after_any_disturbance_goodput_is_back_within_ten_seconds(case: Disturbance) -> None:
    found = recover(case, 8, 3.0, after_s=14.0)
    assert found.before > 0.95
    assert found.seconds <= WITHIN_S


def test_goodput_that_falls_again_is_not_back() -> None:
    assert Recovery("", 1.0, (0.5, 1.0, 0.9, 1.0)).seconds == 6.0
    assert Recovery("", 1.0, (0.5, 1.0, 1.0, 0.9)).seconds == float("inf")
    assert Recovery("", 0.99, (0.98, 1.0)).seconds == 0.0
