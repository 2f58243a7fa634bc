"""Inputs of models: random arrays, and data of files."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.inputs import group_by_sizes, join_samples, model_inputs, random_inputs, read_input_data
from gpuprof.graph.load import load_graph, load_runnable
from tests.small_models import floats, integers, write_encoder, write_model, write_text, write_text_model

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
    text = """(int32[n,300] ids) => (float[] y, float[] z) { wide = Cast <to = 7> (ids) more = Unsqueeze (wide, one)
        y = Gather <axis = 0> (table, more) z = Gather <axis = 1> (small, ids) }"""
    weights = {"table": floats(1000, 2), "small": floats(2, 40), "one": integers(1)}
    path = write_text(tmp_path / "m.onnx", text, weights)
    ids = random_inputs(load_graph(path, 3))["ids"]
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert 30 < ids.max() < 40


@pytest.mark.parametrize(
    ("rows", "added", "least", "most"), [(10, [2], 1, 8), (300, [0, 100, 290], 6, 10)], ids=["shifted", "parts"]
)
def test_added_indices_stay_in_the_table(tmp_path: Path, rows: int, added: list[int], least: int, most: int) -> None:
    text = f"(int64[n,{len(added)}] ids) => (float[] y) {{ more = Add (ids, added) y = Gather (table, more) }}"
    path = write_text(tmp_path / "m.onnx", text, {"table": floats(rows, 2), "added": integers(*added)})
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
    text = "(float[5,batch,3] x, int32[batch] lens) => (float[] y) { y = LSTM <hidden_size = 2> (x, w, r, , lens) }"
    path = write_text(tmp_path / "m.onnx", text, {"w": floats(1, 8, 3), "r": floats(1, 8, 2)})
    assert random_inputs(load_graph(path, 3))["lens"].tolist() == [5, 5, 5]


def test_texts_are_of_those_that_the_model_tells_apart(tmp_path: Path) -> None:
    graph = load_runnable(write_encoder(tmp_path / "m.onnx"), 40)
    cities = random_inputs(graph)["city"]
    assert cities.shape == (40, 1) and set(cities.ravel()) == {"oslo", "rome", "lima"}
    np.testing.assert_array_equal(cities, random_inputs(graph)["city"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text_model(tmp_path / "text.onnx")


@pytest.fixture
def two_inputs(tmp_path: Path) -> Path:
    text = """(float[batch,2,2] x, float[2] z, string[batch,1] words) => (float[] y, string[] said)
        { y = Add (x, z) said = Identity (words) }"""
    return write_text(tmp_path / "two.onnx", text)


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
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: Path, content: str, said: str) -> None:
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
