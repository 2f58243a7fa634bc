"""Trees are read as LightGBM wrote them, and nothing else is."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest
from numpy.typing import NDArray

from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu import forest as forests
from gpuprof.estimators.cross_gpu import forest_code
from gpuprof.estimators.cross_gpu.forest import ForestTexts, read_forest
from gpuprof.estimators.cross_gpu.forest_code import compile_add_leaves
from gpuprof.estimators.cross_gpu.forest_kernel import add_leaves

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


@pytest.mark.parametrize("rounds", [1, 40])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_both_compilers_give_the_same_to_the_last_bit(rounds: int, count: int) -> None:
    forest, rows = read_forest(_train_booster(rounds).model_to_string(), "test"), RNG.normal(size=(count, 4)) * 2
    rows[::7] = np.nan
    found = []
    for add in (compile_add_leaves(), add_leaves):
        sums = np.ones(count)
        add(rows, forest.feature, forest.threshold, forest.left, forest.right, forest.leaves, sums)
        found.append(sums.tolist())
    assert found[0] == found[1] and np.isfinite(found[0]).all()


def test_arrays_that_the_compiled_loop_would_misread_are_refused() -> None:
    forest = read_forest(_train_booster(2).model_to_string(), "test")
    for rows, sums in ((ROWS.astype(np.float32), np.zeros(500)), (ROWS.T, np.zeros(4)), (ROWS[::2], np.zeros(250))):
        with pytest.raises(TypeError, match="must be contiguous float64"):
            compile_add_leaves()(rows, forest.feature, forest.threshold, forest.left, forest.right, forest.leaves, sums)


def test_numba_takes_the_place_of_an_llvm_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(forest_code, "compile_add_leaves", refuse)
    load = forests._load_add_leaves.__wrapped__
    assert load() is add_leaves


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
