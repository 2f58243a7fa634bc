"""Interference by running neighbours: queries the estimator once per combination, at its first occurrence.

The times in a map assume that *all* neighbours run. A function argument (an estimator) returns the time of a batch with
some of them running, as a multiple of the map's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuprof.errors import InputError
from gpuprof.simulator.cluster import PlacedInstance
from gpuprof.simulator.slowdown import Ints, Slowdown, new_slowdown, with_factor

#: (replica, running neighbours in its partition) → time of its batches over the map's.
Interference = Callable[[PlacedInstance, Sequence[PlacedInstance]], float]
_MOST = 2**52


@dataclass(frozen=True, slots=True)
class _ReplicaKind:
    """Equal replicas of a partition: their number, and the weight of a running replica in the combination."""

    example: PlacedInstance
    count: int
    weight: int


class NeighbourSlowdowns:
    """The neighbours of each replica, and the estimator's slowdowns for them."""

    def __init__(self, places: Sequence[PlacedInstance], ask: Interference) -> None:
        self._places, self._ask = places, ask
        self._partitions = _group_by_partition(places)
        self._patterns: dict[Hashable, tuple[int, tuple[_ReplicaKind, ...]]] = {}
        self._pattern_of: list[tuple[int, tuple[_ReplicaKind, ...]]] = [
            self._pattern(group) for group in self._partitions
        ]

    def table(self) -> Slowdown:
        """Return an empty table of slowdowns for the replicas.

        Raises `InputError` when so many replicas share a partition that their combinations cannot be numbered.
        """
        count = len(self._places)
        partition, weight, base = (np.zeros(count, np.int64) for _ in range(3))
        for number, (group, (first, kinds)) in enumerate(zip(self._partitions, self._pattern_of, strict=True)):
            span = _combinations(kinds)
            order = [_kind_of(kind.example) for kind in kinds]
            for position in group:
                kind = order.index(_kind_of(self._places[position]))
                partition[position], weight[position] = number, kinds[kind].weight
                base[position] = first + kind * span if len(group) > 1 else -1
        return new_slowdown(partition, weight, base)

    def fill(self, table: Slowdown) -> Slowdown:
        """Return the table with the missing combination added.

        Raises `InputError` when the factor is not above 0 and below a million, and the function's own errors.
        """
        replica, beside = int(table.missing[0]), int(table.missing[1])
        place, (_, kinds) = self._places[replica], self._pattern_of[int(table.partition[replica])]
        running = []
        for kind in reversed(kinds):
            number, beside = divmod(beside, kind.weight)
            running += [kind.example] * number
        factor = self._ask(place, running)
        if not 0.0 < factor < 1e6:
            raise InputError(f"a slowdown must be above 0 and below a million but {place.name} has {factor:g}")
        return with_factor(table, int(table.base[replica] + table.missing[1]), factor)

    def _pattern(self, group: Ints) -> tuple[int, tuple[_ReplicaKind, ...]]:
        places = [self._places[i] for i in group]
        counts = Counter(_kind_of(place) for place in places)
        # Kinds are sorted by repr, because None and text cannot be compared.
        key = tuple(sorted(((kind, n) for kind, n in counts.items()), key=repr))
        if key not in self._patterns:
            examples = {_kind_of(place): place for place in places}
            # The numbers of running replicas by kind are the digits of a mixed-radix number; weights are place values.
            kinds, weight = [], 1
            for kind, n in key:
                kinds.append(_ReplicaKind(examples[kind], n, weight))
                weight *= n + 1
            ends = [first + len(known) * _combinations(known) for first, known in self._patterns.values()]
            self._patterns[key] = (max(ends, default=0), tuple(kinds))
        first, kinds_of = self._patterns[key]
        if first + len(kinds_of) * _combinations(kinds_of) > _MOST:
            raise InputError(f"{places[0].name} holds too many different replicas to count who runs beside whom")
        return first, kinds_of


def _combinations(kinds: Sequence[_ReplicaKind]) -> int:
    return kinds[-1].weight * (kinds[-1].count + 1)


def _kind_of(place: PlacedInstance) -> tuple[Hashable, ...]:
    replica, mig = place.replica, place.partition.mig
    return (
        place.gpu.device,
        None if mig is None else mig.profile,
        replica.model,
        replica.batch,
        replica.sm_share_pct,
        replica.processes,
        replica.turns,
        replica.batch_latency_ms or (replica.predicted.latency_ms,),
    )


def _group_by_partition(places: Sequence[PlacedInstance]) -> list[Ints]:
    groups: dict[Hashable, list[int]] = {}
    for position, place in enumerate(places):
        groups.setdefault((place.node.name, place.gpu.index, _instance(place)), []).append(position)
    return [np.array(group) for group in groups.values()]


def _instance(place: PlacedInstance) -> Hashable:
    mig = place.partition.mig
    return None if mig is None else (mig.profile, mig.start)
