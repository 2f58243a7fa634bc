"""What the ops of a graph show of the items of a batch, and what they leave open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.graph.item_independence import computes_items_apart
from gpuprof.graph.load import load_graph, load_nodes
from gpuprof.runtime import session
from gpuprof.runtime.batch_items import find_mixed_output
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import floats, write_model

Described = tuple[str, list[str], list[str], dict[str, Any]]


def _is_shown(directory: Path, *nodes: Described, weights: dict[str, Any] | None = None) -> bool:
    made = [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes]
    known = {"w": floats(4, 4), "b": floats(4), "two": floats(2, 4), "rows": np.array([1, 0, 3, 2], np.int64)} | (
        weights or {}
    )
    path = write_model(directory / "m.onnx", made, {"x": ["N", 4]}, outputs={"y": ["N", 4]}, weights=known)
    _, values = load_nodes(path, 2)
    return computes_items_apart(load_graph(path, 2), ["x"], 2, values)


@pytest.mark.parametrize("name", ["squeezenet", "mlp", pytest.param("densenet121", marks=pytest.mark.slow)])
def test_networks_of_images_show_it_and_are_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(find_architecture(name), tmp_path / "m.onnx")
    monkeypatch.setattr(session, "open_session", lambda *_, **__: pytest.fail("it was run"))
    assert find_mixed_output(tmp_path / "m.onnx") is None


@pytest.mark.parametrize(
    "nodes",
    [
        [("Gemm", ["x", "w", "b"], ["y"], {})],
        [("MatMul", ["x", "w"], ["h"], {}), ("Add", ["h", "b"], ["y"], {})],
        [("Softmax", ["x"], ["y"], {"axis": 1})],
        [("ReduceMean", ["x"], ["m"], {"axes": [1]}), ("Sub", ["x", "m"], ["y"], {})],
        [("Concat", ["x", "x"], ["h"], {"axis": 1}), ("Split", ["h"], ["y", "z"], {"axis": 1})],
        [("Gather", ["x", "rows"], ["y"], {"axis": 1})],
    ],
    ids=["gemm", "product and bias", "softmax", "mean", "concat and split", "gather"],
)
def test_ops_along_other_dimensions_keep_items_apart(tmp_path: Path, nodes: list[Described]) -> None:
    assert _is_shown(tmp_path, *nodes)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Softmax", ["x"], ["y"], {"axis": 0})],
        [("Softmax", ["x"], ["y"], {"axis": -2})],
        [("ReduceMean", ["x"], ["m"], {"axes": [0]}), ("Sub", ["x", "m"], ["y"], {})],
        [("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("MatMul", ["x", "t"], ["h"], {}), ("Relu", ["h"], ["y"], {})],
        [("Gather", ["x", "rows"], ["y"], {"axis": 0})],
        [("Add", ["x", "two"], ["y"], {})],
        [("Gemm", ["x", "two"], ["y"], {"transA": 1})],
        [("CumSum", ["x", "rows"], ["y"], {})],
        [("Relu", ["w"], ["y"], {})],
    ],
    ids=["softmax", "negative axis", "mean", "transposed", "other rows", "by row", "transA", "unknown op", "constant"],
)
def test_nothing_is_said_of_what_may_mix_them(tmp_path: Path, nodes: list[Described]) -> None:
    with suppress(InputError):  # what cannot be bound to two items is not shown either
        assert not _is_shown(tmp_path, *nodes)


#: How many items there are, and their numbers, as exporters of attention masks write them.
_NUMBERS: list[Described] = [
    ("Shape", ["x"], ["count"], {"end": 1}),
    ("Squeeze", ["count"], ["limit"], {}),
    ("Range", ["zero", "limit", "one"], ["number"], {}),
    ("Unsqueeze", ["number", "last"], ["index"], {}),
]
_WHOLE_NUMBERS = {
    "zero": np.array(0, np.int64),
    "one": np.array(1, np.int64),
    "last": np.array([1], np.int64),
    "position": np.array([[0, 1, 2, 3]], np.int64),
    "width": np.array([4], np.int64),
}


def test_rows_taken_by_the_number_of_their_item_keep_items_apart(tmp_path: Path) -> None:
    assert _is_shown(tmp_path, *_NUMBERS, ("GatherND", ["x", "index"], ["y"], {}), weights=_WHOLE_NUMBERS)


def test_rows_taken_by_another_number_mix_items(tmp_path: Path) -> None:
    reverse: list[Described] = [("Sub", ["one", "index"], ["other"], {}), ("GatherND", ["x", "other"], ["y"], {})]
    assert not _is_shown(tmp_path, *_NUMBERS, *reverse, weights=_WHOLE_NUMBERS)


@pytest.mark.parametrize(("constant", "shown"), [("position", True), ("number", False)], ids=["positions", "numbers"])
def test_what_is_expanded_for_all_items_is_alike_for_each(tmp_path: Path, constant: str, shown: bool) -> None:
    # Numbers of items are not: what a request gets would hang on its place in the batch.
    shape: list[Described] = [("Concat", ["count", "width"], ["shape"], {"axis": 0})]
    source = "index" if constant == "number" else constant
    looked_up: list[Described] = [
        ("Expand", [source, "shape"], ["all"], {}),
        ("Cast", ["all"], ["real"], {"to": 1}),
        ("Add", ["x", "real"], ["y"], {}),
    ]
    assert _is_shown(tmp_path, *_NUMBERS, *shape, *looked_up, weights=_WHOLE_NUMBERS) == shown
