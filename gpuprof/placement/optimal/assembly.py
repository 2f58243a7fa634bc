"""The integer program over furnished rooms: what stands together counts with what it does to one another.

Beside the program over shares (`Master`), in which neighbours are none, this one chooses among rooms that were
furnished already, each replica with the rate that it can serve beside the others. A map is a number of devices of each
kind, cut into rooms, and a furnished room in each; it serves a demand when the rates of its replicas add up to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuprof.domain.demand import Demand
from gpuprof.domain.share import Share
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.optimal.master import served_column
from gpuprof.placement.optimal.pattern import Cut, Room, cuts
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program, Solution

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Suite:
    """A furnished room: a device as a whole, or one of its MIG instances, wherever it starts.

    Attributes
    ----------
    device : str
    partition : PlacedPartition
        Each replica with the largest rate that it is known to serve beside the others.
    """

    device: str
    partition: PlacedPartition

    @property
    def room(self) -> Room:
        """Of which kind it is."""
        return self.device, self.partition.mig

    def rates(self) -> Mapping[str, float]:
        """Return the rate of each model, of all its replicas together."""
        total: defaultdict[str, float] = defaultdict(float)
        for one in self.partition.replicas:
            total[one.model] += one.rate_rps
        return total


@dataclass(slots=True)
class Assembly:
    """The program that assembles a map from suites.

    Parameters
    ----------
    problem : Problem
    demands : sequence of Demand
        That are to be served; none of whom no suite has a replica makes the program infeasible.
    suites : sequence of Suite
    partial : bool
        Demands may be served in part; the objective is then set by whoever solves the program.

    Attributes
    ----------
    program : Program
    """

    problem: Problem
    demands: Sequence[Demand]
    suites: Sequence[Suite]
    partial: bool = False
    program: Program = field(default_factory=Program)
    _rooms: dict[Room, int] = field(default_factory=dict)
    _cuts: list[tuple[Cut, int]] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _served: list[tuple[Demand, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rooms = {room: self.program.row(low=0.0) for room in dict.fromkeys(one.room for one in self.suites)}
        self._add_cuts()
        rates = {one.model: self._rate_row(one) for one in self.demands}
        most = {d.model: self.program.row(high=d.max_replicas) for d in self.demands if d.max_replicas is not None}
        for suite in self.suites:
            entries = {rates[model]: rate for model, rate in suite.rates().items() if model in rates}
            count = Counter(one.model for one in suite.partition.replicas)
            entries |= {row: float(count[model]) for model, row in most.items() if count[model]}
            self._columns.append(self.program.column(0.0, {**entries, self._rooms[suite.room]: -1.0}))
        for demand in self.demands if self.partial else ():
            self._served.append((demand, served_column(self.program, demand, rates[demand.model])))

    def _rate_row(self, demand: Demand) -> int:
        return self.program.row(low=0.0 if self.partial else demand.rate_rps * (1.0 - _EPSILON))

    def _add_cuts(self) -> None:
        for entry in self.problem.fleet.entries:
            shares = {Share(100.0, mig) for device, mig in self._rooms if device == entry.device.name}
            count = {} if entry.count is None else {self.program.row(high=entry.count): 1.0}
            for cut in cuts(entry.device, shares):
                rooms = {self._rooms[room]: float(n) for room, n in cut.rooms().items()}
                cost = 0.0 if self.partial else entry.price_per_hour
                self._cuts.append((cut, self.program.column(cost, {**rooms, **count})))

    def served_columns(self) -> list[tuple[Demand, int]]:
        """Return the columns of the served rates of a partial program, by demand."""
        return self._served

    def device_costs(self, prices: Mapping[str, float]) -> dict[int, float]:
        """Return the price of every column that takes a device."""
        return {column: prices[cut.device] for cut, column in self._cuts}

    def read(self, solution: Solution) -> tuple[PlacedGpu, ...]:
        """Return the devices of a solution, each demand shared out over its replicas as they can serve it."""
        waiting: defaultdict[Room, list[PlacedPartition]] = defaultdict(list)
        for suite, column in zip(self.suites, self._columns, strict=True):
            waiting[suite.room].extend([suite.partition] * round(solution.values[column]))
        gpus = []
        for cut, column in self._cuts:
            for _ in range(round(solution.values[column])):
                parts = tuple(_furnished(cut, waiting))
                if parts:
                    gpus.append(PlacedGpu(cut.device, parts))
        return tuple(self._rated(gpus))

    def _rated(self, gpus: Sequence[PlacedGpu]) -> Iterator[PlacedGpu]:
        """Yield the devices with no more than is asked for on them."""
        able: defaultdict[str, float] = defaultdict(float)
        for gpu in gpus:
            for one in gpu.replicas():
                able[one.model] += one.rate_rps
        factors = {one.model: min(1.0, one.rate_rps / able[one.model]) for one in self.demands if able[one.model]}
        for gpu in gpus:
            yield PlacedGpu(gpu.device, tuple(_scaled(part, factors) for part in gpu.partitions))


def _furnished(cut: Cut, waiting: Mapping[Room, list[PlacedPartition]]) -> Iterator[PlacedPartition]:
    """Yield what stands in the rooms of one device, taken from what waits for its room."""
    if not cut.layout and waiting.get((cut.device, None)):
        yield waiting[cut.device, None].pop()
    for item in cut.layout:
        if waiting.get((cut.device, item.profile.name)):
            yield replace(waiting[cut.device, item.profile.name].pop(), start=item.start)


def _scaled(partition: PlacedPartition, factors: Mapping[str, float]) -> PlacedPartition:
    replicas = (replace(one, rate_rps=one.rate_rps * factors[one.model]) for one in partition.replicas)
    return replace(partition, replicas=tuple(replicas))


def undominated(suites: Sequence[Suite], demands: Sequence[Demand]) -> tuple[Suite, ...]:
    """Leave out suites that serve no more of anything than another of the same room.

    Where a demand limits the replicas, it needs no more of them either.
    """
    merits = {room: _Merits() for room in dict.fromkeys(one.room for one in suites)}
    ranked = sorted(((_merit(one, demands), one) for one in suites), key=lambda pair: -sum(pair[0]))
    return tuple(suite for merit, suite in ranked if merits[suite.room].adds(np.array(merit)))


@dataclass(slots=True)
class _Merits:
    """What the suites of a room do that were kept so far."""

    _rows: np.ndarray[tuple[int, int], np.dtype[np.float64]] | None = None

    def adds(self, merit: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
        """Keep what none of the kept ones matches in everything; whether it was kept."""
        if self._rows is not None and bool(np.any(np.all(self._rows >= merit * (1.0 - _EPSILON), axis=1))):
            return False
        self._rows = merit[None, :] if self._rows is None else np.vstack([self._rows, merit])
        return True


def _merit(suite: Suite, demands: Sequence[Demand]) -> tuple[float, ...]:
    """Return the rates of the demands, and how few replicas those have of which there may not be many."""
    rates, count = suite.rates(), Counter(one.model for one in suite.partition.replicas)
    few = (float(MPS_CLIENTS - count[one.model]) for one in demands if one.max_replicas is not None)
    return (*(rates.get(one.model, 0.0) for one in demands), *few)
