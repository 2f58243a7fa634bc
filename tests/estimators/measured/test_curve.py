from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.estimate import INTERPOLATED, MEASURED
from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.measured.curve import BatchCurve


def test_a_point_is_itself_and_outside_is_nothing() -> None:
    curve = BatchCurve({2: 5.0, 8: 11.0})
    assert curve.at(2) == (5.0, MEASURED)
    assert curve.at(5) == (8.0, INTERPOLATED)
    assert curve.at(1) is None and curve.at(9) is None


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 100.0), min_size=2, max_size=6), st.integers(1, 64))
def test_between_neighbours_lies_between_them(values: dict[int, float], batch: int) -> None:
    interpolated = BatchCurve(values).at(batch)
    if interpolated:
        assert min(values.values()) - 1e-9 <= interpolated[0] <= max(values.values()) + 1e-9


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_fixed_part_and_a_part_for_each_item_are_followed_exactly(fixed: float, each: float) -> None:
    curve = BatchCurve({n: fixed + each * n for n in (1, 2, 8, 32)})
    assert curve.left_out_errors() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert curve.beyond(64) == pytest.approx(fixed + each * 64)


def test_the_conformal_quantile_needs_enough_values_for_its_level() -> None:
    assert quantile([], 0.9) is None
    assert quantile([1.0, 2.0, 3.0], 0.9) == 3.0
    assert quantile(range(1, 20), 0.9) == 18
