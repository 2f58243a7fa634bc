"""What the ops of a graph show of the items of a batch, and what they leave open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.graph.item_independence import BoundGraph, computes_items_apart
from gpuprof.graph.load import load_graph, load_nodes
from gpuprof.runtime import session
from gpuprof.runtime.batch_items import find_mixed_output
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.small_models import floats, write_model

Described = tuple[str, list[str], list[str], dict[str, Any]]

_NUMBERS_OF_FILE = {
    **{"rows": [1, 0, 3, 2], "along": [1], "rows_axis": [0], "first": [0], "last": [-1], "fourth": [4], "far": [2**40]},
    **{"far_back": [-(2**40)], "forward": [1], "reverse": [-1], "beside": [0, 1, 0, 1], "moved": [1, 0, -1, 0]},
    **{"each": [1, 4], "pairs": [-1, 2], "fours": [-1, 4], "columns": [4, -1]},
}


def _is_shown(directory: Path, *nodes: Described, weights: dict[str, Any] | None = None) -> bool:
    made = [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes]
    constants = {"w": floats(4, 4), "b": floats(4), "two": floats(2, 4)}
    constants |= {name: np.array(numbers, np.int64) for name, numbers in _NUMBERS_OF_FILE.items()} | (weights or {})
    path = write_model(directory / "m.onnx", made, {"x": ["N", 4]}, outputs={"y": ["N", 4]}, weights=constants)
    alone, whole = (BoundGraph(load_graph(path, batch), load_nodes(path, batch)[1]) for batch in (1, 2))
    return computes_items_apart(whole, alone, ["x"])


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
        [
            ("ReduceMean", ["x"], ["m"], {"axes": [-1], "keepdims": 0}),
            ("Unsqueeze", ["m", "along"], ["u"], {}),
            ("Sub", ["x", "u"], ["y"], {}),
        ],
        [("Pad", ["x", "beside"], ["p"], {}), ("Gather", ["p", "rows"], ["y"], {"axis": 1})],
        [("Concat", ["x", "x"], ["h"], {"axis": 1}), ("Slice", ["h", "fourth", "far", "along", "forward"], ["y"], {})],
        [("Slice", ["x", "first", "far", "rows_axis", "forward"], ["y"], {})],
        [("Expand", ["x", "each"], ["y"], {})],
        [("Tile", ["x", "each"], ["h"], {}), ("Gather", ["h", "rows"], ["y"], {"axis": 1})],
        [("TopK", ["x", "fourth"], ["y", "z"], {"axis": 1})],
        [("ReduceL2", ["x"], ["m"], {"axes": [1]}), ("Sub", ["x", "m"], ["y"], {})],
        [
            ("Reshape", ["x", "pairs"], ["p"], {}),
            ("Softmax", ["p"], ["q"], {"axis": 1}),
            ("Reshape", ["q", "fours"], ["y"], {}),
        ],
    ],
    ids=[
        *["gemm", "product and bias", "softmax", "mean", "concat and split", "gather"],
        *["mean without its axis", "padding", "some columns", "all rows", "expanded", "tiled", "sorted"],
        *["norm", "several rows an item"],
    ],
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
        [("TopK", ["x", "forward"], ["t", "z"], {"axis": 0}), ("Add", ["x", "t"], ["y"], {})],
        [("Add", ["x", "two"], ["y"], {})],
        [("Gemm", ["x", "two"], ["y"], {"transA": 1})],
        [("CumSum", ["x", "rows"], ["y"], {})],
        [("Relu", ["w"], ["y"], {})],
        [("ReduceMean", ["x"], ["m"], {"axes": [0], "keepdims": 0}), ("Add", ["x", "m"], ["y"], {})],
        [("Pad", ["x", "moved"], ["y"], {})],
        [("Slice", ["x", "last", "far_back", "rows_axis", "reverse"], ["y"], {})],
        [
            ("Reshape", ["x", "columns"], ["p"], {}),
            ("Softmax", ["p"], ["q"], {}),
            ("Reshape", ["q", "fours"], ["y"], {}),
        ],
        [
            ("Shape", ["x"], ["count"], {"end": 1}),
            ("Cast", ["count"], ["n"], {"to": 1}),
            ("Mul", ["x", "n"], ["y"], {}),
        ],
    ],
    ids=[
        *[
            "softmax",
            "negative axis",
            "mean",
            "transposed",
            "other rows",
            "largest",
            "by row",
            "transA",
            "unknown op",
            "constant",
        ],
        *["mean of rows", "rows moved", "rows reversed", "rows of a fixed number", "how many there are"],
    ],
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


@pytest.mark.parametrize("own", [True, False], ids=["own rows", "rows of others"])
def test_rows_of_flattened_items_keep_items_apart_where_each_takes_its_own(tmp_path: Path, own: bool) -> None:
    # Masks of attention: the rows of all items follow one another, and an item's begin at four times its number.
    begin: list[Described] = [("Mul", ["index", "width" if own else "one"], ["begin"], {})]
    gathered: list[Described] = [
        ("Reshape", ["x", "flat"], ["all"], {}),
        ("Add", ["begin", "position"], ["place"], {}),
        ("Gather", ["all", "place"], ["taken"], {"axis": 0}),
        ("Reshape", ["taken", "fours"], ["y"], {}),
    ]
    weights = _WHOLE_NUMBERS | {"flat": np.array([-1, 1], np.int64)}
    assert _is_shown(tmp_path, *_NUMBERS, *begin, *gathered, weights=weights) == own


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
