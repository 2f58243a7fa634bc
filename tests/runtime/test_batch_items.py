from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.runtime import batch_items
from gpuprof.runtime.batch_items import BatchVerdicts, describe_mixing, find_mixed_output, mixed_output
from tests.small_models import Dims, floats, write_classifier, write_model, write_splitter

Described = tuple[str, list[str], list[str], dict[str, Any]]


def _model(directory: Path, *nodes: Described, **more: object) -> Path:
    made = [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes]
    options: dict[str, object] = {"outputs": {"y": ["N", 4]}, "weights": {"w": floats(4, 4)}, **more}
    return write_model(directory / "m.onnx", made, {"x": ["N", 4]}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nodes",
    [
        [("Softmax", ["x"], ["y"], {"axis": 0})],
        [("ReduceMean", ["x"], ["m"], {"axes": [0]}), ("Sub", ["x", "m"], ["y"], {})],
        [("CumSum", ["x", "zero"], ["y"], {})],
    ],
    ids=["softmax over the batch", "normalised over the batch", "sums over the batch"],
)
def test_a_model_that_mixes_items_behind_a_shape_that_does_not_show_it_is_found(
    tmp_path: Path, nodes: list[Described]
) -> None:
    assert mixed_output(_model(tmp_path, *nodes, weights={"zero": np.array(0, np.int64)})) == "y"


def test_items_that_are_computed_apart_are_not_taken_for_mixed(tmp_path: Path) -> None:
    assert mixed_output(_model(tmp_path, ("Softmax", ["x"], ["s"], {}), ("MatMul", ["s", "w"], ["y"], {}))) is None
    shape: dict[str, list[int | str | None]] = {"x": [3, "batch", 4]}  # the batch comes second
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    assert mixed_output(write_model(tmp_path / "t.onnx", nodes, shape, {"y": [3, "batch", 4]})) is None
    fixed = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    assert mixed_output(write_model(tmp_path / "f.onnx", fixed, {"x": [2, 4]}, {"y": [2, 4]})) is None


def test_an_output_that_is_the_same_for_all_mixes_nothing_and_one_of_all_items_does(tmp_path: Path) -> None:
    apart: Described = ("Relu", ["x"], ["y"], {})
    constant = _model(tmp_path, apart, ("Identity", ["w"], ["z"], {}), outputs={"y": ["N", 4], "z": [4, 4]})
    assert mixed_output(constant) is None
    mean: Described = ("ReduceMean", ["x"], ["z"], {"axes": [0]})
    assert mixed_output(_model(tmp_path, apart, mean, outputs={"y": ["N", 4], "z": [1, 4]})) == "z"
    relation: list[Described] = [("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("MatMul", ["x", "t"], ["z"], {})]
    assert mixed_output(_model(tmp_path, apart, *relation, outputs={"y": ["N", 4], "z": ["N", "N"]})) == "z"


@pytest.mark.parametrize(
    ("x", "t", "y", "found"),
    [
        (["N", 4], ["N", 4], ["N", 4], None),
        (["N", 4], [], ["N", 4], "input t"),
        (["steps", "batch"], ["steps", "batch"], None, "input x"),
        (["N", 4], ["N", 4], [1, 4], "output y"),
        ([2, 4], [], [2, 4], None),
    ],
    ids=["together", "one value for all", "batch after the steps", "an output left at one", "fixed"],
)
def test_requests_share_a_batch_only_where_all_begin_with_it(
    tmp_path: Path, x: Dims, t: Dims, y: Dims | None, found: str | None
) -> None:
    nodes = [helper.make_node("Mul", ["x", "t"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": x, "t": t}, {"y": y})
    assert find_mixed_output(path) == found
    assert found is None or f"the first dimension alone of its {found} must be the batch" in describe_mixing("m", found)


def test_of_a_random_model_nobody_can_tell(tmp_path: Path) -> None:
    noise: Described = ("RandomNormalLike", ["x"], ["n"], {})
    assert mixed_output(_model(tmp_path, noise, ("Add", ["x", "n"], ["y"], {}))) is None


def test_rounding_by_the_largest_of_a_batch_is_no_mixing(tmp_path: Path) -> None:
    quantise: Described = ("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], {})
    nodes: list[Described] = [quantise, ("DequantizeLinear", ["q", "s", "z"], ["y"], {})]
    assert mixed_output(_model(tmp_path, *nodes)) is None


def test_one_index_that_differs_by_chance_is_no_mixing(tmp_path: Path) -> None:
    nodes: list[Described] = [
        ("Softmax", ["x"], ["s"], {"axis": 0}),
        ("ArgMax", ["s"], ["y"], {"axis": 0, "keepdims": 1}),
    ]
    mixing = _model(tmp_path, *nodes, outputs={"y": [1, 4]}, types={"y": TensorProto.INT64})
    assert mixed_output(mixing) == "y"

    def run(inputs: batch_items.Arrays) -> batch_items.Arrays:
        nearly = inputs["x"].shape[0] == 2 and inputs["x"][0, 0] == 0  # of the first seed only
        return {"y": np.full(inputs["x"].shape[:1], int(nearly))}

    assert batch_items.first_mixed(run, lambda seed: {"x": np.full((2, 1), seed)}, {"x": 0}) is None


def test_a_verdict_is_found_once_and_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _model(tmp_path, ("Softmax", ["x"], ["y"], {"axis": 0}))
    assert BatchVerdicts(tmp_path).mixed_output("a" * 64) is None
    assert BatchVerdicts(tmp_path).judge(path, "a" * 64) == "y"
    monkeypatch.setattr(batch_items, "mixed_output", lambda path: pytest.fail("it was run again"))
    assert BatchVerdicts(tmp_path).mixed_output("a" * 64) == "y" == BatchVerdicts(tmp_path).judge(path, "a" * 64)


def test_a_damaged_verdict_is_none_and_without_a_database_nothing_is_written(tmp_path: Path) -> None:
    path = _model(tmp_path, ("Softmax", ["x"], ["y"], {"axis": 0}))
    (tmp_path / ".batched").mkdir()
    (tmp_path / ".batched" / "b.json").write_text("[")
    assert BatchVerdicts(tmp_path).mixed_output("b") is None
    assert BatchVerdicts(tmp_path).judge(path, "b") == "y"
    assert json.loads((tmp_path / ".batched" / "b.json").read_text()) == {"mixed": "y"}
    verdicts = BatchVerdicts(None)
    assert verdicts.judge(path, "c") == "y" == verdicts.mixed_output("c")
    nowhere = BatchVerdicts(tmp_path / "nowhere")
    assert nowhere.judge(path, "d") == "y" and not (tmp_path / "nowhere").exists()


def test_a_verdict_that_is_older_than_its_database_is_written_when_that_is_there(tmp_path: Path) -> None:
    verdicts = BatchVerdicts(tmp_path / "db")
    verdicts.keep("e", None)
    (tmp_path / "db").mkdir()
    verdicts.save()
    assert json.loads((tmp_path / "db" / ".batched" / "e.json").read_text()) == {"mixed": None}


def test_a_map_for_each_item_is_apart_and_a_sequence_of_tensors_belongs_to_nobody(tmp_path: Path) -> None:
    assert find_mixed_output(write_classifier(tmp_path / "c.onnx")) is None
    assert find_mixed_output(write_splitter(tmp_path / "s.onnx")) == "output parts"
