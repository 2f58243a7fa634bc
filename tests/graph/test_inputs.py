from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph, load_runnable
from tests.small_models import floats, integers, write_encoder, write_model

node = helper.make_node
INT64 = TensorProto.INT64


def test_floats_are_normal_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": ["n", 50, 50]}, {"y": None})
    graph = load_graph(path, 4)
    x = random_inputs(graph)["x"]
    assert x.shape == (4, 50, 50)
    assert x.dtype == np.float32
    assert abs(float(x.astype(float).mean())) < 0.05
    assert abs(float(x.astype(float).std()) - 1) < 0.05
    np.testing.assert_array_equal(x, random_inputs(graph)["x"])
    assert not np.array_equal(x, random_inputs(graph, seed=1)["x"])


def test_indices_stay_below_the_table_they_reach_through_other_ops(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx",
        [
            node("Cast", ["ids"], ["wide"], to=INT64),
            node("Unsqueeze", ["wide", "one"], ["more"]),
            node("Gather", ["table", "more"], ["y"], axis=0),
            node("Gather", ["small", "ids"], ["z"], axis=1),
        ],
        {"ids": ["n", 300]},
        {"y": None, "z": None},
        {"table": floats(1000, 2), "small": floats(2, 40), "one": integers(1)},
        types={"ids": TensorProto.INT32},
    )
    ids = random_inputs(load_graph(path, 3))["ids"]
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert 30 < ids.max() < 40


@pytest.mark.parametrize(
    ("rows", "added", "least", "most"), [(10, [2], 1, 8), (300, [0, 100, 290], 6, 10)], ids=["shifted", "parts"]
)
def test_indices_stay_inside_the_table_after_an_addition(
    tmp_path: Path, rows: int, added: list[int], least: int, most: int
) -> None:
    path = write_model(
        tmp_path / "m.onnx",
        [node("Add", ["ids", "added"], ["more"]), node("Gather", ["table", "more"], ["y"])],
        {"ids": ["n", len(added)]},
        {"y": None},
        {"table": floats(rows, 2), "added": integers(*added)},
        types={"ids": INT64},
    )
    ids = random_inputs(load_graph(path, 200))["ids"]
    assert ids.min() >= 0 and least <= ids.max() < most


def test_masks_are_ones_positions_count_and_images_have_bytes(tmp_path: Path) -> None:
    names = {"attention_mask": INT64, "position_ids": INT64, "picture": TensorProto.UINT8, "flag": TensorProto.BOOL}
    path = write_model(
        tmp_path / "m.onnx",
        [node("Identity", [name], [f"{name}_out"]) for name in names],
        {"attention_mask": ["n", 6], "position_ids": ["n", 6], "picture": ["n", 30, 30, 3], "flag": ["n"]},
        {f"{name}_out": None for name in names},
        types=names | {f"{name}_out": kind for name, kind in names.items()},
    )
    inputs = random_inputs(load_graph(path, 2))
    assert (inputs["attention_mask"] == 1).all()
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert inputs["picture"].dtype == np.uint8
    assert inputs["picture"].max() > 200
    assert inputs["flag"].all()


def test_lengths_of_sequences_are_full(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx",
        [node("LSTM", ["x", "w", "r", "", "lens"], ["y"], hidden_size=2)],
        {"x": [5, "batch", 3], "lens": ["batch"]},
        {"y": None},
        {"w": floats(1, 8, 3), "r": floats(1, 8, 2)},
        types={"lens": TensorProto.INT32},
    )
    assert random_inputs(load_graph(path, 3))["lens"].tolist() == [5, 5, 5]


def test_texts_are_of_those_that_the_model_tells_apart(tmp_path: Path) -> None:
    graph = load_runnable(write_encoder(tmp_path / "m.onnx"), 40)
    cities = random_inputs(graph)["city"]
    assert cities.shape == (40, 1) and set(cities.ravel()) == {"oslo", "rome", "lima"}
    np.testing.assert_array_equal(cities, random_inputs(graph)["city"])


def test_where_the_model_counts_words_a_text_has_several(tmp_path: Path) -> None:
    counts = node(
        "TfIdfVectorizer", ["words"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
        ngram_counts=[0], ngram_indexes=[0, 1], pool_strings=["good", "bad"],
    )  # fmt: skip
    kinds = {"text": TensorProto.STRING, "words": TensorProto.STRING}
    path = write_model(
        tmp_path / "m.onnx", [node("Identity", ["text"], ["words"]), counts], {"text": ["n"]}, {"y": None}, types=kinds
    )
    (text,) = random_inputs(load_graph(path))["text"]
    assert len(text.split()) > 1 and set(text.split()) <= {"good", "bad"}
