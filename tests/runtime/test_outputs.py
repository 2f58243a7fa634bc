from __future__ import annotations

import json

import numpy as np
import pytest

from gpuprof.runtime.outputs import is_collection, is_sequence_of_maps, to_numbers, to_texts


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ([{7: 0.5, 9: 0.25}, {7: 1.0, 9: 0.0}], [{"7": 0.5, "9": 0.25}, {"7": 1.0, "9": 0.0}]),
        ({"cat": 0.5}, [{"cat": 0.5}]),
        ([np.array([[1.0, 2.0]], np.float32), np.array([3], np.int64)], [[[1.0, 2.0]], [3]]),
        ([{b"cat": float("nan")}], [{"cat": None}]),
        ([], []),
    ],
)
def test_each_element_is_one_text_of_json(value: object, texts: list[object]) -> None:
    converted = to_texts(value)
    assert converted.shape == (len(texts),) and converted.dtype == object
    assert [json.loads(text) for text in converted] == texts


def test_maps_are_compared_by_their_values_and_not_as_texts() -> None:
    rows = to_numbers([{"b": 1.0, "a": 2.0}, {"a": 4.0, "b": 3.0}])
    assert rows.dtype.kind == "f" and rows.tolist() == [[2.0, 1.0], [4.0, 3.0]]
    assert to_numbers([{"a": 1.0}, {"b": 1.0}]).dtype == object
    assert to_numbers(np.ones(3)).shape == (3,)


def test_types_are_told_as_onnx_runtime_writes_them() -> None:
    assert is_collection("seq(map(int64,tensor(float)))") and is_sequence_of_maps("seq(map(int64,tensor(float)))")
    assert is_collection("seq(tensor(float))") and not is_sequence_of_maps("seq(tensor(float))")
    assert is_collection("map(string,tensor(float))") and not is_collection("tensor(float)")
