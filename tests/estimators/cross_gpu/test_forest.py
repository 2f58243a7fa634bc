"""Trees are read as LightGBM wrote them, and nothing else is."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest

from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.forest import read_forest

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(500, 4))
TARGET = np.where(ROWS[:, 0] > 0.2, ROWS[:, 1] ** 2, -1.0) + 0.1 * ROWS[:, 3]


def _train_booster(rounds: int) -> lightgbm.Booster:
    data = lightgbm.Dataset(ROWS, TARGET, params={"verbose": -1})
    return lightgbm.train(
        {"objective": "l1", "num_leaves": 9, "verbose": -1, "num_threads": 1}, data, num_boost_round=rounds
    )


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_sum_of_the_trees_is_what_lightgbm_says(rounds: int) -> None:
    booster = _train_booster(rounds)
    others = RNG.normal(size=(300, 4)) * 2
    forest = read_forest(booster.model_to_string(), "test")
    assert forest.predict(others) == pytest.approx(booster.predict(others), rel=1e-12, abs=1e-12)


def test_many_rows_have_the_sums_that_each_of_them_has_alone() -> None:
    forest, many = read_forest(_train_booster(5).model_to_string(), "test"), RNG.normal(size=(5003, 4))
    assert forest.predict(many).tolist() == [sum_ for row in many for sum_ in forest.predict(row[None]).tolist()]


def test_no_rows_give_no_sums() -> None:
    assert read_forest(_train_booster(2).model_to_string(), "test").predict(np.zeros((0, 4))).shape == (0,)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("split_feature=", "split_feature=99 "),
        ("num_leaves=", "num_leaves=9"),
        ("left_child=", "left_child=0 "),
        ("Tree=", "Bush="),
        ("max_feature_idx", "something"),
    ],
)
def test_a_damaged_file_is_refused(old: str, new: str) -> None:
    text = _train_booster(2).model_to_string()
    assert old in text
    with pytest.raises(InputError, match="test is no regressor that gpuprof trained"):
        read_forest(text.replace(old, new), "test")
