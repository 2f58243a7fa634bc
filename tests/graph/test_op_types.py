from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper

from gpuprof.graph.op_types import list_op_types
from tests.small_models import write_model


def test_ops_within_branches_are_listed(tmp_path: Path) -> None:
    branches = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Sigmoid")):
        given = helper.make_tensor_value_info(op, TensorProto.FLOAT, ["N", 4])
        branches[name] = helper.make_graph([helper.make_node(op, ["x"], [op])], name, [], [given])
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["is_any"], to=TensorProto.BOOL),
        helper.make_node("If", ["is_any"], ["y"], **branches),
    ]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 4]}, {"y": ["N", 4]})
    assert list_op_types(path) == {"ReduceMax", "Cast", "If", "Relu", "Sigmoid"}
