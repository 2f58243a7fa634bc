"""Identifies models of the same architecture, whatever their names: a fine-tuned copy is no independent test case."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from gpuprof.domain.model import ModelGraph, Op

#: Models of one architecture have so large a part of their ops in common: all but a head that was replaced.
_COMMON = 0.9

_Content = Counter[str]


def name_architectures(graphs: Iterable[ModelGraph]) -> Mapping[str, str]:
    """Return for the name of each model the first, by the alphabet, of all that are the same architecture.

    Two models are the same where nine tenths of all their ops have type, attributes and shapes of weights in common:
    neither names, values of weights, batch nor sizes of free dimensions matter.
    """
    contents: dict[str, _Content] = {}
    for graph in graphs:
        contents.setdefault(graph.name, Counter(map(_describe_op, graph.ops)))
    names: dict[str, str] = {}
    for name in sorted(contents):
        alike = (first for first in dict.fromkeys(names.values()) if _is_alike(contents[first], contents[name]))
        names[name] = next(alike, name)
    return names


def _describe_op(op: Op) -> str:
    weights = [(weight.dtype, weight.shape) for weight in op.weights]
    return json.dumps([op.domain, op.op_type, dict(op.attributes), weights], sort_keys=True, default=str)


def _is_alike(first: _Content, second: _Content) -> bool:
    return (first & second).total() >= _COMMON * (first | second).total()
