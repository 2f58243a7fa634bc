import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.errors import InputError
from gpuprof.graph.executed_graph import ExecutedNode, Group, tie_nodes
from gpuprof.graph.file import ContentHash, list_op_types, read_onnx
from gpuprof.graph.merged_model import (
    METADATA_KEY,
    MergedMember,
    MergedModel,
    MergedValue,
    read_description,
    write_description,
)
from tests.small_models import floats, write_model, write_text


def _graph(*ops: tuple[str, list[str], list[str]]) -> ModelGraph:
    def tensors(names: list[str]) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, "float32", (1, 4)) for name in names)

    made = tuple(
        Op(f"op{i}", kind, "", tensors(inputs), tensors(outputs), (), {}, None, 16, 16)
        for i, (kind, inputs, outputs) in enumerate(ops)
    )
    return ModelGraph("net", 1, made, tensors(["x"]), made[-1].outputs, (), 17, "", "")


def _node(kind: str, inputs: list[str], outputs: list[str], name: str = "") -> ExecutedNode:
    return ExecutedNode(name, kind, tuple(inputs), tuple(outputs))


CONV_RELU_ADD = _graph(("Conv", ["x"], ["c"]), ("Relu", ["c"], ["r"]), ("Add", ["r", "x"], ["y"]))


ADD = _node("Add", ["r", "x"], ["y"])


@pytest.mark.parametrize(
    ("executed", "groups", "untied"),
    [
        pytest.param([_node("Conv", ["x"], ["c"]), _node("Relu", ["c"], ["r"]), ADD],
                     [([0], [0]), ([1], [1]), ([2], [2])], (), id="as they are"),
        pytest.param([_node("FusedConv", ["x"], ["r"]), ADD], [([0, 1], [0]), ([2], [1])], (), id="fused"),
        # The change back works for the convolution.
        pytest.param([_node("Conv", ["x"], ["token_1"], "r_nchwc"), _node("ReorderOutput", ["token_1"], ["r"]), ADD],
                     [([0, 1], [0, 1]), ([2], [2])], (), id="blocked layout, by its name"),
        pytest.param([_node("ReorderInput", ["x"], ["t0"]), _node("FusedConv", ["t0"], ["r"]), ADD],
                     [([0, 1], [1, 0]), ([2], [2])], (), id="added for one node"),
        pytest.param([_node("Transpose", ["x"], ["t"]), _node("FusedConv", ["t"], ["r"]),
                      _node("Add", ["r", "t"], ["y"])], [([0, 1], [1]), ([2], [2])], (0,), id="added for several"),
        pytest.param([_node("Conv", ["x"], ["new"]), _node("Relu", ["new"], ["r"]), ADD],
                     [([0, 1], [1, 0]), ([2], [2])], (), id="renamed chain"),
        pytest.param([ADD, _node("FusedConv", ["x"], ["r"])], [([2], [0]), ([0, 1], [1])], (), id="in another order"),
    ],
)  # fmt: skip
def test_executed_nodes_are_tied_to_the_ops_up_to_the_tensor_they_make(
    executed: list[ExecutedNode], groups: list[tuple[list[int], list[int]]], untied: tuple[int, ...]
) -> None:
    tied = tie_nodes(CONV_RELU_ADD, executed)
    assert tied.groups == tuple(Group(*group) for group in groups)
    assert tied.untied == untied and tied.unexecuted == ()


def test_ops_that_nothing_computes_are_said_to_be_unexecuted() -> None:
    graph = _graph(("Relu", ["x"], ["r"]), ("Shape", ["r"], ["dead"]), ("Add", ["r", "x"], ["y"]))
    tied = tie_nodes(graph, [_node("Relu", ["x"], ["r"]), _node("Add", ["r"], ["y"])])
    assert tied.unexecuted == (1,)


def test_every_op_is_in_one_group_at_most() -> None:
    graph = _graph(("Relu", ["x"], ["a"]), ("Split", ["a"], ["b", "c"]), ("Add", ["b", "c"], ["y"]))
    tied = tie_nodes(graph, [_node("Split", ["x"], ["b", "c"]), _node("Add", ["b", "c"], ["y"])])
    owned = [position for group in tied.groups for position in group.ops]
    assert sorted(owned) == [0, 1, 2]


def _write(directory: Path) -> Path:
    text = "(float[N,256] x) => (float[N,512] y) { h = MatMul (x, w) y = Add (h, b) }"
    return write_text(directory / "m.onnx", text, {"w": floats(256, 512), "b": floats(512)})


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
