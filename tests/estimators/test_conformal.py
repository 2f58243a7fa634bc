"""Intervals hold what they promise for architectures that nobody has seen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpuprof.estimators.conformal import common_factor, interval_factor, left_out_residuals


def test_the_common_factor_counts_architectures_and_not_figures() -> None:
    assert common_factor({"often": [9.0] * 100, "a": [2.0], "b": [1.0, 3.0, 100.0]}) == 3.0


def test_an_architecture_is_held_against_the_others() -> None:
    residuals = left_out_residuals({"a": [2.0], "b": [2.0, 4.0], "odd": [20.0]})
    assert residuals["odd"] == [pytest.approx(math.log(20.0 / 2.5))]
    assert residuals["b"] == pytest.approx([math.log(2.0 / 11.0), math.log(4.0 / 11.0)])


def test_nine_of_ten_figures_of_a_new_architecture_are_inside() -> None:
    random = np.random.default_rng(3)
    inside = []
    for _ in range(400):
        middles = np.exp(random.normal(0.0, 0.8, 31))
        ratios = {str(i): list(middle * np.exp(random.normal(0.0, 0.2, 4))) for i, middle in enumerate(middles)}
        new = ratios.pop("30")
        spread, factor = interval_factor(left_out_residuals(ratios)), common_factor(ratios)
        assert spread is not None
        inside += [1.0 / spread <= value / factor <= spread for value in new]
    assert 0.88 <= np.mean(inside) <= 0.95
