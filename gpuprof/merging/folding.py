"""Folds batch normalisations into convolutions where several models share both.

A runtime folds batch normalisations when it loads a graph and creates new weights for each convolution, so weights
shared in the file would be held twice in memory. Folding them here yields equal weights again, which are held once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import NodeProto

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.normalisation import add_weight, attribute, whole
from gpuprof.merging.source import SourceModel

_EPSILON = 1e-5
_FOLDED_TYPES = (np.float32, np.float64)


def fold_shared_norms(sources: Sequence[SourceModel]) -> None:
    """Fold each batch normalisation that occurs with equal constants, its convolution's too, in several sources."""
    counts = Counter(key for source in sources for key in {key for *_, key in _pairs(source)})
    for source in sources:
        chosen = [(conv, norm) for conv, norm, key in _pairs(source) if counts[key] > 1]
        for conv, norm in chosen:
            _fold(source, conv, norm)
        if chosen:
            gone = {id(norm) for _, norm in chosen}
            source.nodes = [node for node in source.nodes if id(node) not in gone]
            used = {name for node in source.nodes for name in (*node.input, *list_captured(node))} | set(source.outputs)
            source.weights = {name: tensor for name, tensor in source.weights.items() if name in used}


def _pairs(source: SourceModel) -> Iterator[tuple[NodeProto, NodeProto, object]]:
    """Yield (convolution, normalisation after it, key that is equal for equal pairs)."""
    for norm in source.nodes:
        if norm.op_type != "BatchNormalization" or norm.domain or whole(norm, "training_mode", 0):
            continue
        conv = source.maker(norm.input[0])
        if conv is None or conv.op_type != "Conv" or conv.domain or source.uses(norm.input[0]) > 1:
            continue
        constants = [*conv.input[1:], *norm.input[1:5]]
        if len(norm.output) > 1 or not all(not name or name in source.weights for name in constants):
            continue
        if source.array(conv.input[1]).dtype not in _FOLDED_TYPES:
            continue
        digests = tuple(source.digest(name) if name else "" for name in constants)
        yield conv, norm, (digests, _epsilon(norm))


def _fold(source: SourceModel, conv: NodeProto, norm: NodeProto) -> None:
    weight = source.array(conv.input[1])
    scale, shift, mean, variance = (np.asarray(source.array(name), np.float64) for name in norm.input[1:5])
    given = conv.input[2] if len(conv.input) > 2 else ""
    bias = np.asarray(source.array(given), np.float64) if given else np.zeros(len(weight))
    factor = scale / np.sqrt(variance + _epsilon(norm))
    names = []
    for name, value in (
        ("weight", np.asarray(weight, np.float64) * factor.reshape(-1, *(1 for _ in weight.shape[1:]))),
        ("bias", (bias - mean) * factor + shift),
    ):
        names.append(_new_name(source, f"{norm.output[0]}/{name}"))
        add_weight(source, names[-1], value.astype(weight.dtype))
    conv.input[:] = [conv.input[0], *names]
    conv.output[0] = norm.output[0]


def _epsilon(norm: NodeProto) -> float:
    value = attribute(norm, "epsilon", _EPSILON)
    return value if isinstance(value, float) else _EPSILON


def _new_name(source: SourceModel, name: str) -> str:
    while name in source.weights or name in source.values:
        name += "_"
    return name
