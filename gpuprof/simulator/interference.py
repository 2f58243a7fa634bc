"""Interference by running neighbours: queries the estimator once per combination, at its first occurrence.

The times in a map assume that *all* neighbours run. A function argument (an estimator) returns the time of a batch with
some of them running, as a multiple of the map's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuprof.errors import InputError
from gpuprof.simulator.cluster import PlacedInstance
from gpuprof.simulator.state import Slowdown, new_slowdown, with_factor

#: (replica, running neighbours in its partition) → time of its batches over the map's.
Interference = Callable[[PlacedInstance, Sequence[PlacedInstance]], float]


class NeighbourSlowdowns:
    """The neighbours of each replica, and the estimator's slowdowns for them."""

    def __init__(self, places: Sequence[PlacedInstance], ask: Interference) -> None:
        self._places, self._ask = places, ask
        self._kinds = [_kind_of(place) for place in places]
        self._factors: dict[Hashable, float] = {}
        partitions: dict[Hashable, int] = {}
        self._partition = np.array([partitions.setdefault(_partition_of(place), len(partitions)) for place in places])

    def table(self) -> Slowdown:
        """Return an empty table of slowdowns for the replicas.

        Weights are random, equal for equal replicas: the sum of the running ones tells their combination, since two
        sums of numbers below 2**48 practically never coincide.
        """
        random = np.random.Generator(np.random.PCG64(0))
        numbers: dict[Hashable, tuple[int, int]] = {}
        for partition, kind in zip(self._partition.tolist(), self._kinds, strict=True):
            numbers.setdefault((partition, kind), (int(random.integers(2**48)), int(random.integers(2**62))))
        pairs = [numbers[key] for key in zip(self._partition.tolist(), self._kinds, strict=True)]
        alone = np.bincount(self._partition)[self._partition] == 1
        weight, base = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
        return new_slowdown(self._partition, weight, np.where(alone, -1, base))

    def fill(self, table: Slowdown, runs: NDArray[np.bool_]) -> Slowdown:
        """Return the table with the factor of the missing combination, cached for equal devices.

        ``runs``: whether each replica runs a batch. Raises `InputError` when the factor is not above 0 and below a
        million, and the errors of the interference function.
        """
        replica = int(table.missing[0])
        mask = runs & (self._partition == self._partition[replica])
        mask[replica] = False
        positions = np.flatnonzero(mask).tolist()
        key = self._kinds[replica], frozenset(Counter(self._kinds[position] for position in positions).items())
        if key not in self._factors:
            self._factors[key] = self._ask(self._places[replica], [self._places[position] for position in positions])
        factor = self._factors[key]
        if not 0.0 < factor < 1e6:
            name = self._places[replica].name
            raise InputError(f"a slowdown must be above 0 and below a million but {name} has {factor:g}")
        return with_factor(table, int(table.missing[1]), factor)


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


def _partition_of(place: PlacedInstance) -> Hashable:
    mig = place.partition.mig
    return place.node.name, place.gpu.index, None if mig is None else (mig.profile, mig.start)
