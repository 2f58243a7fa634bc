"""Weights that an op holds as they are: tables that it looks up in, and what a recurrent op carries through time.

Their ops are no matrix operators of USHER's §2.4, so that no part of them is cut out and shared: such weights are
shared whole or not at all.
"""

from __future__ import annotations

from onnx import NodeProto

from gpuprof.merging.source import SourceModel

_TABLE = {"Gather": (0,)}
_RECURRENT = {"LSTM": (1, 2), "GRU": (1, 2), "RNN": (1, 2)}
_INPUTS = _TABLE | _RECURRENT
#: Less than this part of a model's weights is no reason to merge it: many models have the same table of positions.
_LEAST_PART = 0.01


def shareable_constants(source: SourceModel, node: NodeProto) -> tuple[str, ...]:
    """Return the constants that an op holds, none where they are too small a part of the model to be worth sharing."""
    if node.domain not in ("", "ai.onnx"):
        return ()
    inputs = [node.input[i] for i in _INPUTS.get(node.op_type, ()) if i < len(node.input)]
    names = tuple(name for name in inputs if name in source.weights and len(source.weights[name].dims) >= 2)
    bytes_of = source.weight_bytes
    least = _LEAST_PART * sum(bytes_of(name) for name in source.weights)
    return names if sum(bytes_of(name) for name in names) >= max(1.0, least) else ()


def is_lookup(node: NodeProto) -> bool:
    """Return whether an op reads only the rows of its table that it is asked for, however many models ask."""
    return node.op_type in _TABLE
