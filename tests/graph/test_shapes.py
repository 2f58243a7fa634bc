"""Shapes against the cases that ONNX ships for every version of every op."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.load import load_graph
from tests.small_models import write_model

#: Whose outputs are as large as the data says: the largest size stands for it.
DATA_DECIDES = {"Unique", "Compress", "NonZero", "NonMaxSuppression"}
#: Cases with sequences, optionals and axes that only the caller knows are rightly refused.
MOST_REFUSED_PCT = 6.0


def batch_of(model: ModelProto) -> int:
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input]
    return next((shape[0] for shape in shapes if shape), 1) or 1


def shape_of(value: object) -> tuple[int, ...] | None:
    if isinstance(value, TensorProto):
        return tuple(value.dims)
    return None if isinstance(value, list | dict) or value is None else np.asarray(value).shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shapes_are_those_that_the_reference_gives_or_the_case_is_refused(tmp_path: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    cases = [(c.name, c.model, c.data_sets[0]) for c in collect_testcases(None) if c.model and c.data_sets]
    path = tmp_path / "m.onnx"
    wrong, refused = [], []
    for name, model, data in cases:
        path.write_bytes(model.SerializeToString())
        try:
            graph = load_graph(path, batch_of(model))
        except InputError as error:
            assert "\n" not in str(error)
            refused.append(name)
            continue
        given = [shape_of(value) for value in data[1]]
        agrees = all(want in (None, output.shape) for output, want in zip(graph.outputs, given, strict=False))
        if not agrees and not DATA_DECIDES & {op.op_type for op in graph.ops}:
            wrong.append(name)
    assert len(cases) > 1000
    assert wrong == []
    assert 100 * len(refused) < MOST_REFUSED_PCT * len(cases)


def test_a_weight_of_more_dimensions_than_an_array_may_have_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1] * 194, [0.0])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(InputError, match="'w' cannot be read"):
        load_graph(tmp_path / "m.onnx", 1)


def test_copies_counted_by_a_one_hot_value_are_known(tmp_path: Path) -> None:
    """As exporters write ``repeat_interleave``."""
    nodes = [
        helper.make_node("OneHot", ["places", "depth", "off_on"], ["repeats"]),
        helper.make_node("Tile", ["x", "repeats"], ["y"]),
    ]
    weights = {"places": np.array(-2), "depth": np.array(3), "off_on": np.array([1, 4])}
    graph = load_graph(write_model(tmp_path / "m.onnx", nodes, {"x": ["batch", 8, 5]}, {"y": None}, weights), 2)
    assert graph.outputs[0].shape == (2, 32, 5)


def test_a_type_that_an_op_does_not_take_is_not_blamed_on_assumed_sizes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["above"]),
        helper.make_node("CumSum", ["above", "axis"], ["y"]),
    ]
    weights = {"zero": np.array(0, np.float32), "axis": np.array(1)}
    types = {"y": TensorProto.BOOL}
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["batch", "seq"]}, {"y": None}, weights, types=types)
    with pytest.raises(InputError, match=r"CumSum.*tensor\(bool\) \(export it again with an input of a type"):
        load_graph(path)
