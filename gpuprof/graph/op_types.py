"""Op types of a file, readable even where its shapes are unknown."""

from __future__ import annotations

from pathlib import Path

from gpuprof.graph.file import read_onnx
from gpuprof.graph.nodes import graphs_of


def list_op_types(path: Path) -> frozenset[str]:
    """Return the op types of all nodes of a file, subgraphs included.

    Raises `InputError` when the file is missing, damaged or not ONNX.
    """
    return frozenset(node.op_type for graph in graphs_of(read_onnx(path).model.graph) for node in graph.node)
