from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.graph.merged_model import (
    METADATA_KEY,
    MergedMember,
    MergedModel,
    MergedValue,
    read_description,
    write_description,
)


def _make_description() -> MergedModel:
    members = tuple(
        MergedMember(
            name,
            f"{name}.onnx",
            "0" * 64,
            (MergedValue("x", f"{name}/x", "float32", (None, 3)), MergedValue("ids", f"{name}/ids", "int64", (None,))),
            (MergedValue("y", f"{name}/y", "float32", (None, 2)),),
            rows,
        )
        for name, rows in (("a", 0), ("b", 0), ("c", 1))
    )
    return MergedModel(members)


def test_the_description_survives_the_file() -> None:
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [])
    model = helper.make_model(graph)
    model.metadata_props.add(key="author", value="somebody")
    write_description(model, MergedModel(()))
    write_description(model, _make_description())
    read = {entry.key: entry.value for entry in onnx.ModelProto.FromString(model.SerializeToString()).metadata_props}
    assert read["author"] == "somebody"
    assert len(read) == 2
    assert read_description(read, "m.onnx") == _make_description()
    assert read_description({}, "m.onnx") is None


def test_absent_models_are_fed_as_they_can_take_it() -> None:
    x, ids = np.ones((2, 3), np.float32), np.array([1, 2])
    fed = _make_description().feeds({"a": {"x": x, "ids": ids}})
    assert fed["a/x"] is x
    assert {name: value.shape for name, value in fed.items() if name.endswith("/x")} == {
        "a/x": (2, 3),
        "b/x": (0, 3),
        "c/x": (1, 3),
    }
    assert fed["c/ids"].dtype == np.int64


def test_answers_come_under_the_models_own_names() -> None:
    results = {"a/y": np.zeros(1), "b/y": np.ones(1)}
    assert _make_description().answers(results, "b") == {"y": results["b/y"]}
    assert _make_description().output_names("b") == ["b/y"]


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ({"z": {}}, "unknown merged model 'z'"),
        ({"a": {"x": np.ones((1, 3))}}, "a needs the input 'ids'"),
        ({"a": {"x": np.ones((1, 3)), "ids": np.ones(1), "q": np.ones(1)}}, "unknown input of a 'q'"),
    ],
)
def test_requests_that_do_not_fit_are_refused(requests: dict[str, dict[str, np.ndarray]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        _make_description().feeds(requests)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "gpuprof.merged/1"}', '{"schema": "gpuprof.merged/9", "models": []}']
)
def test_a_damaged_or_newer_description_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"m\.onnx"):
        read_description({METADATA_KEY: text}, "m.onnx")
