"""Interference by running neighbours: queries the estimator once per combination, at its first occurrence.

The times in a map assume that *all* neighbours run. A function argument (an estimator) returns the time of a batch with
some of them running, as a multiple of the map's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from gpuprof.errors import InputError
from gpuprof.simulator.cluster import PlacedInstance
from gpuprof.simulator.slowdown import Ints, Slowdown, new_slowdown, with_factor

#: (replica, running neighbours in its partition) → time of its batches over the map's.
Interference = Callable[[PlacedInstance, Sequence[PlacedInstance]], float]
_MOST = 2**52


class NeighbourSlowdowns:
    """The neighbours of each replica, and the estimator's slowdowns for them.

    Raises `InputError` when so many replicas share a partition that their combinations cannot be numbered.
    """

    def __init__(self, places: Sequence[PlacedInstance], ask: Interference) -> None:
        self._places, self._ask = places, ask
        self._factors: dict[Hashable, float] = {}
        self._partition, self._weight, self._base = (np.zeros(len(places), np.int64) for _ in range(3))
        #: By partition, a replica of each kind and the weight of a running replica of this kind in the combination.
        self._kinds: list[list[tuple[PlacedInstance, int]]] = []
        first = 0
        for number, group in enumerate(_group_by_partition(places)):
            counts = Counter(_kind_of(places[position]) for position in group)
            # The numbers of running replicas by kind are the digits of a mixed-radix number; weights are place values.
            weights, span = {}, 1
            for kind, count in counts.items():
                weights[kind] = span
                span *= count + 1
            for position in group:
                kind = _kind_of(places[position])
                self._partition[position], self._weight[position] = number, min(weights[kind], _MOST)
                self._base[position] = min(first + list(weights).index(kind) * span, _MOST) if len(group) > 1 else -1
            first += len(counts) * span
            if first > _MOST:
                raise InputError(
                    f"{places[group[0]].name} holds too many different replicas to count who runs beside whom"
                )
            examples = {_kind_of(places[position]): places[position] for position in group}
            self._kinds.append([(examples[kind], weight) for kind, weight in weights.items()])

    def table(self) -> Slowdown:
        """Return an empty table of slowdowns for the replicas."""
        return new_slowdown(self._partition, self._weight, self._base)

    def fill(self, table: Slowdown) -> Slowdown:
        """Return the table with the factor of the missing combination, cached for equal devices.

        Raises `InputError` when the factor is not above 0 and below a million, and the errors of the interference
        function.
        """
        replica, code = int(table.missing[0]), int(table.missing[1])
        place, neighbours, remainder = self._places[replica], list[PlacedInstance](), code
        for example, weight in reversed(self._kinds[int(table.partition[replica])]):
            number, remainder = divmod(remainder, weight)
            neighbours += [example] * number
        key = _kind_of(place), frozenset(Counter(map(_kind_of, neighbours)).items())
        if key not in self._factors:
            self._factors[key] = self._ask(place, neighbours)
        factor = self._factors[key]
        if not 0.0 < factor < 1e6:
            raise InputError(f"a slowdown must be above 0 and below a million but {place.name} has {factor:g}")
        return with_factor(table, int(table.base[replica]) + code, factor)


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
