from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpuprof.errors import InputError
from gpuprof.profiling.per_op.op_model import distinct_ops, write_op_model
from tests.profiling.models import OPSET, write_convs, write_mlp


def _save(path: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], out: list[int | str]) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, out)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=OPSET, ir_version=8), str(path))
    return path


def test_every_distinct_op_of_a_model_runs_alone_with_its_shapes(tmp_path: Path) -> None:
    sources = distinct_ops(write_convs(tmp_path / "convs.onnx"), 3, "convs")
    assert len(sources) == 5  # two convolutions, and of norm, relu and add one each: the second have equal shapes
    for source in sources.values():
        feeds = write_op_model(source, tmp_path / "op.onnx")
        outputs = ort.InferenceSession(str(tmp_path / "op.onnx")).run(None, feeds)
        assert [output.shape for output in outputs] == [tensor.shape for tensor in source.op.outputs]
        assert len(onnx.load(str(tmp_path / "op.onnx")).graph.node) == 1


def test_an_op_that_appears_twice_is_found_once(tmp_path: Path) -> None:
    assert len(distinct_ops(write_mlp(tmp_path / "mlp.onnx", layers=4), 2, "mlp")) == 3


def test_a_shape_that_the_model_computes_is_a_constant_of_the_op(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([24]), "rest")]
    sources = distinct_ops(_save(tmp_path / "m.onnx", nodes, weights, ["n", 24]), 5, "m")
    reshape = next(source for source in sources.values() if source.op.op_type == "Reshape")
    feeds = write_op_model(reshape, tmp_path / "op.onnx")
    assert list(feeds) == ["x"]
    (out,) = ort.InferenceSession(str(tmp_path / "op.onnx")).run(None, feeds)
    assert out.shape == (5, 24)


def test_indices_stay_within_their_table(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.ones((7, 2), np.float32), "table")
    node = helper.make_node("Gather", ["table", "i"], ["y"])
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["n", 50])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 50, 2])
    graph = helper.make_graph([node], "g", [i], [y], [table])
    onnx.save(helper.make_model(graph, opset_imports=OPSET, ir_version=8), str(tmp_path / "m.onnx"))
    (source,) = distinct_ops(tmp_path / "m.onnx", 4, "m").values()
    feeds = write_op_model(source, tmp_path / "op.onnx")
    assert feeds["i"].max() < 7
    assert len(ort.InferenceSession(str(tmp_path / "op.onnx")).run(None, feeds)) == 1


def test_an_op_whose_subgraph_takes_values_from_outside_cannot_stand_alone(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branches = [
        helper.make_graph([helper.make_node(kind, ["x"], ["o"])], kind, [], [out]) for kind in ("Relu", "Identity")
    ]
    condition = numpy_helper.from_array(np.array(True), "c")
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    sources = distinct_ops(_save(tmp_path / "m.onnx", [node], [condition], ["n", 4, 6]), 1, "m")
    source = next(source for source in sources.values() if source.op.op_type == "If")
    with pytest.raises(InputError, match="subgraphs that take values from outside"):
        write_op_model(source, tmp_path / "op.onnx")
