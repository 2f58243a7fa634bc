from __future__ import annotations

import pytest

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.graph.executed_graph import ExecutedNode, Group, tie_nodes


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
