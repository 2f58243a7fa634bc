"""Which ops a file holds, whatever else can be said of it."""

from __future__ import annotations

from pathlib import Path

from gpuprof.graph.file import read_onnx
from gpuprof.graph.nodes import graphs_of


def list_op_types(path: Path) -> frozenset[str]:
    """Return the types of all nodes of a file, those of subgraphs included.

    Raises `InputError` when the file is missing, damaged or no ONNX file.
    """
    return frozenset(node.op_type for graph in graphs_of(read_onnx(path).model.graph) for node in graph.node)
