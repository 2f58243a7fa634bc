"""Trained trees are ONNX models that give LightGBM's sums."""

from __future__ import annotations

import sys

import lightgbm
import numpy as np
import pytest

from bench.tree_export import export_trees
from gpuprof.errors import InputError, UnavailableError
from gpuprof.estimators.cross_gpu.cost_model import Forest, Forests

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(500, 4))
TARGET = np.where(ROWS[:, 0] > 0.2, ROWS[:, 1] ** 2, -1.0) + 0.1 * ROWS[:, 3]


def _train_booster(rounds: int) -> lightgbm.Booster:
    data = lightgbm.Dataset(ROWS, TARGET, params={"verbose": -1})
    return lightgbm.train(
        {"objective": "l1", "num_leaves": 9, "verbose": -1, "num_threads": 1}, data, num_boost_round=rounds
    )


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_sum_of_the_trees_is_lightgbms(rounds: int) -> None:
    booster, inputs = _train_booster(rounds), RNG.normal(size=(300, 4)) * 2
    forest = Forest(export_trees(booster), "test")
    assert forest.predict(inputs) == pytest.approx(booster.predict(inputs), rel=1e-6, abs=1e-6)


def test_rows_on_a_threshold_go_left_in_double_precision() -> None:
    booster = _train_booster(40)
    edges = np.array(list(booster.trees_to_dataframe()["threshold"].dropna()))[:, None] + np.zeros(4)
    for rows in (edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)):
        assert Forest(export_trees(booster), "test").predict(rows) == pytest.approx(booster.predict(rows), abs=1e-6)


def test_without_onnx_runtime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UnavailableError, match=r"need ONNX Runtime, .*\[cpu\]"):
        Forest(export_trees(_train_booster(1)), "test")


def test_a_forest_is_opened_when_it_is_needed() -> None:
    forests = Forests({"sound": export_trees(_train_booster(1)), "damaged": b"Tree=0"})
    assert forests["sound"] is forests["sound"]
    with pytest.raises(InputError, match="damaged is no regressor that gpuprof trained"):
        forests["damaged"]
