"""Memory is of tensors, however many ops read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpuprof.estimators.memory.memory_features import MEMORY_FEATURES, memory_features
from gpuprof.graph.load import load_graph
from tests.estimators.rows import two_layers


def test_weights_that_layers_share_are_counted_once(tmp_path: Path) -> None:
    graph = load_graph(two_layers(tmp_path / "two.onnx"))
    first, relu, second = graph.ops
    shared = replace(second, inputs=(second.inputs[0], first.inputs[1]), weights=first.weights)
    twice, once = (
        memory_features(replace(graph, ops=(first, relu, last)))[MEMORY_FEATURES.index("log_matrix_weights")]
        for last in (second, shared)
    )
    assert round(2.718281828459045**twice - 1) == 2 * round(2.718281828459045**once - 1) == 2 * 64 * 64 * 4
