"""Trees are read as LightGBM wrote them, and nothing else is."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest
from numpy.typing import NDArray

from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu import forest as forests
from gpuprof.estimators.cross_gpu.forest import Forest, ForestTexts, read_forest

Array = NDArray[np.float64]
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


def _predict_with(monkeypatch: pytest.MonkeyPatch, rows_of_numpy: int, forest: Forest, rows: Array) -> list[float]:
    monkeypatch.setattr(forests._numpy_rows, "left", rows_of_numpy)
    return list(forest.predict(rows).tolist())


@pytest.mark.parametrize("rounds", [1, 40])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_numpy_gives_to_the_last_bit_what_the_compiled_loop_gives(
    rounds: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forest, rows = read_forest(_train_booster(rounds).model_to_string(), "test"), RNG.normal(size=(count, 4)) * 2
    by_numpy = _predict_with(monkeypatch, 1000, forest, rows)
    assert forests._numpy_rows.left == 1000 - count
    assert by_numpy == _predict_with(monkeypatch, 0, forest, rows)


def test_numpy_takes_rows_until_loading_the_loop_has_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forests._numpy_rows, "left", 10)
    assert [forests._numpy_rows.take(count) for count in (4, 4, 4, 1)] == [True, True, False, False]


def test_a_forest_is_read_when_it_is_asked_for() -> None:
    texts = ForestTexts({"sound": _train_booster(1).model_to_string(), "damaged": "Tree=0"})
    assert list(texts) == ["sound", "damaged"] and len(texts) == 2
    assert texts["sound"] is texts["sound"]
    with pytest.raises(InputError, match="damaged is no regressor"):
        texts["damaged"]


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
