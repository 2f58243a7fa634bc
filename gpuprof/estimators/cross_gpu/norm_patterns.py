"""Finds normalisations that exporters write as chains of means and element-wise ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.model import Op

_SCALING, _SQUARING = ("Div", "Mul"), ("Pow", "Mul")


@dataclass(frozen=True, slots=True)
class NormPattern:
    """The nodes of a normalisation, by their places in the graph."""

    first: int  #: The mean at its beginning.
    others: tuple[int, ...]
    row: int  #: Elements normalised together.


class NormSearch:
    """Finds normalisations in a graph.

    ``readers``: tensor → ops that read it; ``maker``: tensor → op that makes it.
    """

    def __init__(self, ops: Sequence[Op], readers: Mapping[str, list[int]], maker: Mapping[str, int]) -> None:
        self._ops, self._readers, self._maker = ops, readers, maker

    def find_layer_norms(self) -> Iterator[NormPattern]:
        """Yield ``(x - mean) / sqrt(mean((x - mean)²) + epsilon)``, scaled and shifted or not, below opset 17."""
        for first, op in enumerate(self._ops):
            if op.op_type != "ReduceMean":
                continue
            centred = self._read_by(first, "Sub")
            if centred is None or op.inputs[0] not in self._ops[centred].inputs:
                continue
            for square in self._list_readers(centred, _SQUARING):
                mean = self._read_by(square, "ReduceMean")
                scaled = None if mean is None else self._follow_root(mean)
                if mean is not None and scaled is not None and self._makes_input(centred, scaled[-1]):
                    yield self._pattern(first, [centred, square, mean, *scaled])

    def find_rms_norms(self) -> Iterator[NormPattern]:
        """Yield ``x / sqrt(mean(x²) + epsilon)``, scaled or not: several kernels eagerly, a single kernel if fused."""
        for square, op in enumerate(self._ops):
            mean = self._read_by(square, "ReduceMean") if op.op_type in _SQUARING else None
            scaled = None if mean is None else self._follow_root(mean)
            if mean is not None and scaled is not None and op.inputs[0] in self._ops[scaled[-1]].inputs:
                yield self._pattern(mean, [square, *scaled])

    def _follow_root(self, mean: int) -> list[int] | None:
        """Return the nodes from a mean's epsilon to the scaling by its root, None where the pattern ends earlier."""
        nodes, place = [], mean
        for kind in ("Add", "Sqrt"):
            reader = self._read_by(place, kind)
            if reader is None:
                return None
            nodes.append(place := reader)
        inverse = self._read_by(place, "Reciprocal")
        if inverse is None and (over := self._read_by(place, "Div")) is not None:
            inverse = over if self._ops[over].outputs[0].elements == self._ops[place].outputs[0].elements else None
        if inverse is not None:
            nodes.append(place := inverse)
        scaled = next(iter(self._list_readers(place, _SCALING)), None)
        return None if scaled is None else [*nodes, scaled]

    def _pattern(self, first: int, places: list[int]) -> NormPattern:
        last = places[-1]
        for kind in ("Mul", "Add"):  # the learned scale and shift
            reader = self._read_by(last, kind)
            if reader is not None and self._ops[reader].weights:
                places.append(last := reader)
        whole, means = self._ops[first].inputs[0].elements, self._ops[first].outputs[0].elements
        return NormPattern(first, tuple(places), max(1, whole // max(1, means)))

    def _list_readers(self, place: int, kinds: Sequence[str]) -> list[int]:
        readers = (reader for tensor in self._ops[place].outputs for reader in self._readers[tensor.name])
        return [reader for reader in readers if self._ops[reader].op_type in kinds]

    def _read_by(self, place: int, kind: str) -> int | None:
        """Return the first op of type ``kind`` that reads an output of ``place``."""
        return next(iter(self._list_readers(place, (kind,))), None)

    def _makes_input(self, place: int, reader: int) -> bool:
        return any(self._maker.get(tensor.name) == place for tensor in self._ops[reader].inputs)
