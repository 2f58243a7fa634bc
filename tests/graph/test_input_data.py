from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.input_data import group_by_sizes, join_samples, model_inputs, read_input_data
from tests.small_models import write_model, write_text_model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text_model(tmp_path / "text.onnx")


@pytest.fixture
def two_inputs(tmp_path: Path) -> Path:
    return write_model(
        tmp_path / "two.onnx",
        [helper.make_node("Add", ["x", "z"], ["y"]), helper.make_node("Identity", ["words"], ["said"])],
        {"x": ["batch", 2, 2], "z": [2], "words": ["batch", 1]},
        {"y": None, "said": None},
        types={"words": TensorProto.STRING, "said": TensorProto.STRING},
    )


def write_json(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_an_npz_file_holds_samples_behind_one_another_in_the_batch(tmp_path: Path, two_inputs: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.savez(tmp_path / "d.npz", x=x, z=np.ones(2), words=np.array([["a"], ["b"], ["c"]]))
    shapes = model_inputs(two_inputs)
    data = read_input_data(tmp_path / "d.npz", shapes)
    assert len(data.samples) == 3
    assert data.samples[1]["words"].tolist() == [["b"]]
    batch = join_samples(data.samples, 4, shapes)
    assert batch["x"].tolist() == [*x.tolist(), x[0].tolist()]
    assert batch["z"].dtype == np.float32 and batch["z"].shape == (2,)
    assert batch["words"].dtype == object


def test_json_is_read_as_perf_analyzer_writes_it(tmp_path: Path, two_inputs: Path) -> None:
    raw = base64.b64encode(np.arange(4, dtype="<f4").tobytes()).decode()
    entries = [
        {"x": [1, 2, 3, 4], "z": {"content": [5.0, 6.0], "shape": [2]}, "words": ["one"]},
        {"x": {"b64": raw}, "z": [0, 0], "words": {"b64": base64.b64encode(b"two").decode()}},
        {"x": {"content": [[1, 1], [2, 2]]}, "z": [0, 0], "words": "three"},
    ]
    data = read_input_data(write_json(tmp_path / "d.json", {"data": entries}), model_inputs(two_inputs))
    assert data.samples[0]["x"].tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert data.samples[1]["x"].tolist() == [[[0.0, 1.0], [2.0, 3.0]]]
    assert [sample["words"].tolist() for sample in data.samples] == [[["one"]], [["two"]], [["three"]]]


def test_samples_of_several_sizes_are_told_apart(tmp_path: Path, text: Path) -> None:
    entries = [{"ids": [1, 2, 3]}, {"ids": [4, 5]}, {"ids": {"content": [6, 7, 8], "shape": [3]}}]
    data = read_input_data(write_json(tmp_path / "d.json", {"data": entries}), model_inputs(text))
    groups = group_by_sizes(data, text)
    assert {sizes: [sample["ids"].tolist() for sample in samples] for sizes, samples in groups.items()} == {
        (("seq", 3),): [[[1, 2, 3]], [[6, 7, 8]]],
        (("seq", 2),): [[[4, 5]]],
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "neither .npz nor JSON"),
        ("[]", 'no list "data"'),
        ('{"data": []}', "holds no samples"),
        ('{"data": [[]]}', "must be an object .* but is list"),
        ('{"data": [{"id": [1]}]}', "lacks the input 'ids'"),
        ('{"data": [{"ids": [1], "more": [1]}]}', "'more', which is no input"),
        ('{"data": [{"ids": ["a"]}]}', "takes int64 but has"),
        ('{"data": [{"ids": [1.5]}]}', "int64 cannot hold"),
        ('{"data": [{"ids": [1e999]}]}', "number 1e999 is larger than any type holds"),
        ('{"data": [{"ids": [Infinity]}]}', "int64 cannot hold"),
        ('{"data": [{"ids": {"content": [1, 2], "shape": [3]}}]}', "takes 3 values but has size 2"),
        ('{"data": [{"ids": {"b64": "?"}}]}', "input ids"),
        ('{"data": [{"ids": {"shape": [1]}}]}', 'neither "content" nor "b64"'),
        ('{"data": [{"ids": {"content": [1, 2], "shape": [1, 2]}}]}', r"shape \[1, 'seq'\] but has \[1, 1, 2\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, text: Path, content: str, said: str
) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        read_input_data(path, model_inputs(text))


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, two_inputs: Path) -> None:
    shapes, path = model_inputs(two_inputs), tmp_path / "d.npz"
    good = {"x": np.zeros((2, 2, 2)), "z": np.zeros(2), "words": np.array([["a"], ["b"]])}
    for wrong, message in (
        ({"x": np.zeros((2, 3, 2))}, r"x must have shape \[1, 2, 2\] but has \[1, 3, 2\]"),
        ({"x": np.zeros((3, 2, 2))}, "not hold as many samples of each input: x 3, words 2"),
        ({"words": np.zeros((2, 1))}, "words takes texts but has float64"),
        ({"z": np.array(["a", "b"])}, "z takes float32 but has"),
    ):
        np.savez(path, **{**good, **wrong})  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message):
            read_input_data(path, shapes)
    path.write_bytes(b"PK damaged")
    with pytest.raises(InputError, match=r"cannot read .* as \.npz"):
        read_input_data(path, shapes)
    with pytest.raises(InputError, match="cannot read"):
        read_input_data(tmp_path / "gone.npz", shapes)


def test_a_number_may_be_infinite_but_not_become_so(tmp_path: Path, two_inputs: Path) -> None:
    entry = {"x": [float("-inf"), 1, 2, 3], "z": [0, 0], "words": ["a"]}
    (sample,) = read_input_data(write_json(tmp_path / "d.json", {"data": [entry]}), model_inputs(two_inputs)).samples
    assert np.isneginf(sample["x"].ravel()[0])
    with pytest.raises(InputError, match="input x has values that float32 cannot hold"):
        read_input_data(
            write_json(tmp_path / "d.json", {"data": [entry | {"x": [1e39, 1, 2, 3]}]}), model_inputs(two_inputs)
        )
