"""Files read whole: damaged weights, files that are cut off, the hash of several files, and the ops in them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.graph.file import ContentHash, list_op_types, read_onnx
from tests.small_models import floats, write_model


def _write(directory: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    return write_model(
        directory / "m.onnx",
        nodes,
        {"x": ["N", 256]},
        outputs={"y": ["N", 512]},
        weights={"w": floats(256, 512), "b": floats(512)},
    )


def test_data_of_large_weights_is_dropped_and_its_declaration_kept(tmp_path: Path) -> None:
    path = _write(tmp_path)
    file = read_onnx(path)
    assert [tensor.name for tensor in file.model.graph.initializer] == ["b"]
    assert file.weights["w"].shape == (256, 512)
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_content_of_several_files_is_hashed_as_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 3_000)
    (tmp_path / "b").write_bytes(b"b")
    content = ContentHash((tmp_path / "a", tmp_path / "b"), ((3_000, 0), (1, 0)))
    assert content.sha256 == hashlib.sha256(b"a" * 3_000 + b"b").hexdigest()
    (tmp_path / "a").unlink()
    assert content.sha256  # computed once
    with pytest.raises(InputError, match="cannot read model"):
        ContentHash((tmp_path / "a",), ((3_000, 0),)).sha256  # noqa: B018 - raises


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
