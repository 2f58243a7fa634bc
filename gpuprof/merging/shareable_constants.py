"""Weights shared whole or not at all: lookup tables, and the weights of recurrent ops.

Their ops are not among the matrix operators of USHER's §2.4, so no common part is cut out and shared.
"""

from __future__ import annotations

from onnx import NodeProto

from gpuprof.merging.source import SourceModel

_TABLE = {"Gather": (0,)}
_RECURRENT = {"LSTM": (1, 2), "GRU": (1, 2), "RNN": (1, 2)}
_INPUTS = _TABLE | _RECURRENT
#: Least part of a model's weights that justifies a merge: many models have the same table of positions.
_LEAST_PART = 0.01


def shareable_constants(source: SourceModel, node: NodeProto) -> tuple[str, ...]:
    """Return the shareable constants of an op; empty if too small a part of the model's weights."""
    if node.domain not in ("", "ai.onnx"):
        return ()
    inputs = [node.input[i] for i in _INPUTS.get(node.op_type, ()) if i < len(node.input)]
    names = tuple(name for name in inputs if name in source.weights and len(source.weights[name].dims) >= 2)
    bytes_of = source.weight_bytes
    least = _LEAST_PART * sum(bytes_of(name) for name in source.weights)
    return names if sum(bytes_of(name) for name in names) >= max(1.0, least) else ()


def is_lookup(node: NodeProto) -> bool:
    """Return whether an op is a lookup, which reads only the requested rows of its table."""
    return node.op_type in _TABLE
