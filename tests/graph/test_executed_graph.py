from __future__ import annotations

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


def test_nodes_executed_as_they_are_are_tied_one_to_one() -> None:
    tied = tie_nodes(
        CONV_RELU_ADD, [_node("Conv", ["x"], ["c"]), _node("Relu", ["c"], ["r"]), _node("Add", ["r"], ["y"])]
    )
    assert tied.groups == (Group([0], [0]), Group([1], [1]), Group([2], [2]))
    assert tied.untied == tied.unexecuted == ()


def test_a_fused_node_computes_all_ops_up_to_the_tensor_it_makes() -> None:
    tied = tie_nodes(CONV_RELU_ADD, [_node("FusedConv", ["x"], ["r"]), _node("Add", ["r", "x"], ["y"])])
    assert tied.groups == (Group([0, 1], [0]), Group([2], [1]))


def test_a_node_of_the_blocked_layout_is_tied_by_its_name() -> None:
    executed = [
        _node("Conv", ["x"], ["token_1"], "r_nchwc"),
        _node("ReorderOutput", ["token_1"], ["r"]),
        _node("Add", ["r", "x"], ["y"]),
    ]
    tied = tie_nodes(CONV_RELU_ADD, executed)
    assert tied.groups == (Group([0, 1], [0, 1]), Group([2], [2]))  # the change back works for the convolution


def test_an_added_node_works_for_the_one_that_takes_its_output() -> None:
    executed = [_node("ReorderInput", ["x"], ["t0"]), _node("FusedConv", ["t0"], ["r"]), _node("Add", ["r"], ["y"])]
    assert tie_nodes(CONV_RELU_ADD, executed).groups == (Group([0, 1], [1, 0]), Group([2], [2]))


def test_an_added_node_that_serves_several_groups_is_tied_to_none() -> None:
    executed = [_node("Transpose", ["x"], ["t"]), _node("FusedConv", ["t"], ["r"]), _node("Add", ["r", "t"], ["y"])]
    assert tie_nodes(CONV_RELU_ADD, executed).untied == (0,)


def test_a_renamed_chain_is_one_group_with_both_times() -> None:
    executed = [_node("Conv", ["x"], ["new"]), _node("Relu", ["new"], ["r"]), _node("Add", ["r", "x"], ["y"])]
    assert tie_nodes(CONV_RELU_ADD, executed).groups == (Group([0, 1], [1, 0]), Group([2], [2]))


def test_ops_that_nothing_computes_are_said_to_be_unexecuted() -> None:
    graph = _graph(("Relu", ["x"], ["r"]), ("Shape", ["r"], ["dead"]), ("Add", ["r", "x"], ["y"]))
    tied = tie_nodes(graph, [_node("Relu", ["x"], ["r"]), _node("Add", ["r"], ["y"])])
    assert tied.unexecuted == (1,)


def test_every_op_is_in_one_group_at_most() -> None:
    graph = _graph(("Relu", ["x"], ["a"]), ("Split", ["a"], ["b", "c"]), ("Add", ["b", "c"], ["y"]))
    tied = tie_nodes(graph, [_node("Split", ["x"], ["b", "c"]), _node("Add", ["b", "c"], ["y"])])
    owned = [position for group in tied.groups for position in group.ops]
    assert sorted(owned) == [0, 1, 2]


def test_groups_do_not_hang_on_the_order_in_which_nodes_are_listed() -> None:
    executed = [_node("Add", ["r", "x"], ["y"]), _node("FusedConv", ["x"], ["r"])]
    assert tie_nodes(CONV_RELU_ADD, executed).groups == (Group([2], [0]), Group([0, 1], [1]))
