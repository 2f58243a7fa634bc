"""What is executed as one: measured, or as ONNX Runtime's optimizer says, with what is fused counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpuprof.estimators.learned.training_set import group_facts, measured_groups, optimized_groups, working_set_bytes
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import OpRow
from tests.estimators.measured_world import convolutional
from tests.estimators.rows import two_layers


def test_the_optimizer_executes_a_relu_with_its_convolution(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16, 16)))
    groups = optimized_groups(graph)
    assert groups is not None
    together = {graph.ops[anchor].name: {graph.ops[place].name for place in group} for anchor, group in groups.items()}
    assert together["conv0"] == {"conv0", "relu0"} and together["conv1"] == {"conv1", "relu1"}


def test_a_graph_that_the_runtime_refuses_or_whose_file_is_gone_is_left_to_what_was_learnt(tmp_path: Path) -> None:
    odd = load_graph(two_layers(tmp_path / "odd.onnx", middle="Nobodys"))
    assert optimized_groups(odd) is None
    assert optimized_groups(replace(odd, path=str(tmp_path / "gone.onnx"))) is None


def _row(name: str, duration_ns: int | None, note: str | None = None) -> OpRow:
    return OpRow("r", "net", "cpu", 1, 0, name, "Conv", "c", duration_p50_ns=duration_ns, note=note)


def test_what_was_measured_together_is_read_from_the_rows(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16,)))
    rows = [_row(op.name, 5) for op in graph.ops]
    rows[1] = _row("relu0", None, "fused into conv0")
    groups = measured_groups(graph, rows)
    assert groups is not None and groups[0] == (0, 1) and 1 not in groups
    assert measured_groups(graph, rows[1:]) is None


def test_a_group_counts_functions_and_the_activations_that_it_reads_besides(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16,)))
    conv, relu = graph.ops[:2]
    skipped = replace(relu.inputs[0], name="skipped")
    for op, functions, inputs in (
        (replace(relu, op_type="Sigmoid"), 1, 0),
        (replace(relu, op_type="Add", inputs=(relu.inputs[0], skipped)), 0, 1),
        (replace(relu, op_type="Add", inputs=(relu.inputs[0], graph.inputs[0])), 0, 0),  # the convolution reads it
    ):
        fused = replace(graph, ops=(conv, op))
        (facts,) = group_facts(fused, {0: (0, 1)})
        assert (facts.fused, facts.fused_functions, facts.fused_inputs) == (2, functions, inputs)
        assert facts.working_set == working_set_bytes(fused)
