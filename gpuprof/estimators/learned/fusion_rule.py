"""Predicts the ops that a runtime executes as part of another op, learned from measured models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.model import ModelGraph

Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class FusionRule:
    """Frequencies at which ops are executed by themselves."""

    executed: Mapping[Key, float]  #: Fraction of an op's occurrences with a time of their own.

    def fractions(self, graph: ModelGraph) -> list[float]:
        """Return for each op of ``graph`` the expected fraction executed by itself; 1 where unknown."""
        return [self.executed.get(key, 1.0) for key in _keys(graph)]


def learn_fusion(models: Iterable[tuple[ModelGraph, Sequence[bool]]]) -> FusionRule:
    """Return the rule learned from graphs and, for each of their ops, whether it had a time of its own."""
    counts: dict[Key, list[int]] = {}
    for graph, executed in models:
        for key, was in zip(_keys(graph), executed, strict=True):
            counts.setdefault(key, []).append(int(was))
    return FusionRule({key: sum(seen) / len(seen) for key, seen in counts.items()})


def _keys(graph: ModelGraph) -> list[Key]:
    producer = {tensor.name: op.op_type for op in graph.ops for tensor in op.outputs}
    readers: dict[str, int] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            readers[tensor.name] = readers.get(tensor.name, 0) + 1
    keys = []
    for op in graph.ops:
        first = op.inputs[0].name if op.inputs else ""
        keys.append((op.op_type, producer.get(first, ""), readers.get(first, 0) == 1))
    return keys
