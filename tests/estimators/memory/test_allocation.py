"""Memory is of tensors, however many ops read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpuprof.estimators.memory.allocation import list_parts
from gpuprof.graph.load import load_graph
from tests.estimators.rows import two_layers


def test_weights_that_layers_share_are_counted_once(tmp_path: Path) -> None:
    graph = load_graph(two_layers(tmp_path / "two.onnx"))
    first, relu, second = graph.ops
    shared = replace(second, inputs=(second.inputs[0], first.inputs[1]), weights=first.weights)
    twice, once = (list_parts(replace(graph, ops=(first, relu, last)))[0] for last in (second, shared))
    assert twice == 2 * once == 2 * 64 * 64 * 4
