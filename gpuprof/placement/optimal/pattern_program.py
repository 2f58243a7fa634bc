"""The integer program over replica patterns, which counts interference.

The program over shares (`RestrictedMaster`) ignores interference; this program chooses among patterns that are planned
already, each replica with the rate it can serve beside its neighbours. A map is a number of devices of each kind,
their configurations, and a pattern in each partition; it serves a demand when the rates of its replicas add up to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuprof.domain.demand import Demand
from gpuprof.domain.share import Share
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.optimal.pattern import DeviceConfiguration, PartitionKind, list_configurations
from gpuprof.placement.optimal.restricted_master import served_column
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program, Solution

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaPattern:
    """The replicas of a partition: a whole device, or a MIG instance at any start."""

    device: str
    partition: PlacedPartition  #: Each replica with the largest known rate it can serve beside its neighbours.

    @property
    def kind(self) -> PartitionKind:
        """Return the kind of the partition."""
        return self.device, self.partition.mig

    def rates(self) -> Mapping[str, float]:
        """Return the total rate of each model over its replicas."""
        total: defaultdict[str, float] = defaultdict(float)
        for one in self.partition.replicas:
            total[one.model] += one.rate_rps
        return total


@dataclass(slots=True)
class PatternProgram:
    """The program that assembles a map from patterns."""

    problem: Problem
    #: Demands to serve; a demand without a replica in any pattern makes the program infeasible.
    demands: Sequence[Demand]
    patterns: Sequence[ReplicaPattern]
    partial: bool = False  #: Demands may be served in part; the objective is then set by the caller.
    program: Program = field(default_factory=Program)
    _kind_rows: dict[PartitionKind, int] = field(default_factory=dict)
    _configurations: list[tuple[DeviceConfiguration, int]] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _served: list[tuple[Demand, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kind_rows = {kind: self.program.row(low=0.0) for kind in dict.fromkeys(one.kind for one in self.patterns)}
        self._add_configurations()
        rates = {one.model: self._rate_row(one) for one in self.demands}
        most = {d.model: self.program.row(high=d.max_replicas) for d in self.demands if d.max_replicas is not None}
        for pattern in self.patterns:
            entries = {rates[model]: rate for model, rate in pattern.rates().items() if model in rates}
            count = Counter(one.model for one in pattern.partition.replicas)
            entries |= {row: float(count[model]) for model, row in most.items() if count[model]}
            self._columns.append(self.program.column(0.0, {**entries, self._kind_rows[pattern.kind]: -1.0}))
        for demand in self.demands if self.partial else ():
            self._served.append((demand, served_column(self.program, demand, rates[demand.model])))

    def _rate_row(self, demand: Demand) -> int:
        # Replicas that just serve the demand may add up to a little less by rounding.
        return self.program.row(low=0.0 if self.partial else demand.rate_rps * (1.0 - _EPSILON))

    def _add_configurations(self) -> None:
        for entry in self.problem.fleet.entries:
            shares = {Share(100.0, mig) for device, mig in self._kind_rows if device == entry.device.name}
            count = {} if entry.count is None else {self.program.row(high=entry.count): 1.0}
            for configuration in list_configurations(entry.device, shares):
                kind_rows = {self._kind_rows[kind]: float(n) for kind, n in configuration.partitions().items()}
                cost = 0.0 if self.partial else entry.price_per_hour
                self._configurations.append((configuration, self.program.column(cost, {**kind_rows, **count})))

    def served_columns(self) -> list[tuple[Demand, int]]:
        """Return the columns of the served rates of a partial program, by demand."""
        return self._served

    def device_costs(self, prices: Mapping[str, float]) -> dict[int, float]:
        """Return the price of every column taking a device."""
        return {column: prices[configuration.device] for configuration, column in self._configurations}

    def read_solution(self, solution: Solution) -> tuple[PlacedGpu, ...]:
        """Return the devices of a solution, each demand divided among its replicas in proportion to their capacity."""
        waiting: defaultdict[PartitionKind, list[PlacedPartition]] = defaultdict(list)
        for pattern, column in zip(self.patterns, self._columns, strict=True):
            waiting[pattern.kind].extend([pattern.partition] * round(solution.values[column]))
        gpus = []
        for configuration, column in self._configurations:
            for _ in range(round(solution.values[column])):
                parts = tuple(fill_configuration(configuration, waiting))
                if parts:
                    gpus.append(PlacedGpu(configuration.device, parts))
        return tuple(self._limit_rates(gpus))

    def _limit_rates(self, gpus: Sequence[PlacedGpu]) -> Iterator[PlacedGpu]:
        """Yield the devices with at most the demanded rates on them."""
        able: defaultdict[str, float] = defaultdict(float)
        for gpu in gpus:
            for one in gpu.replicas():
                able[one.model] += one.rate_rps
        factors = {one.model: min(1.0, one.rate_rps / able[one.model]) for one in self.demands if able[one.model]}
        for gpu in gpus:
            yield PlacedGpu(gpu.device, tuple(_scale_rates(part, factors) for part in gpu.partitions))


def fill_configuration(
    configuration: DeviceConfiguration, waiting: Mapping[PartitionKind, list[PlacedPartition]]
) -> Iterator[PlacedPartition]:
    """Yield the partitions of a device, taken from the waiting partitions of the same kind."""
    if not configuration.layout and waiting.get((configuration.device, None)):
        yield waiting[configuration.device, None].pop()
    for item in configuration.layout:
        if waiting.get((configuration.device, item.profile.name)):
            yield replace(waiting[configuration.device, item.profile.name].pop(), start=item.start)


def _scale_rates(partition: PlacedPartition, factors: Mapping[str, float]) -> PlacedPartition:
    replicas = (replace(one, rate_rps=one.rate_rps * factors[one.model]) for one in partition.replicas)
    return replace(partition, replicas=tuple(replicas))


def drop_dominated(patterns: Sequence[ReplicaPattern], demands: Sequence[Demand]) -> tuple[ReplicaPattern, ...]:
    """Drop patterns that another pattern of the same partition dominates in every rate.

    Where a demand limits its replicas, the dominating pattern also needs no more of them.
    """
    merits = {kind: _DominanceFilter() for kind in dict.fromkeys(one.kind for one in patterns)}
    # Sorted by falling sums, so that no pattern comes before its dominating pattern: a single pass is enough.
    ranked = sorted(((_dominance_key(one, demands), one) for one in patterns), key=lambda pair: -sum(pair[0]))
    return tuple(pattern for merit, pattern in ranked if merits[pattern.kind].adds(np.array(merit)))


@dataclass(slots=True)
class _DominanceFilter:
    """Merits of the kept patterns of a partition."""

    _rows: np.ndarray[tuple[int, int], np.dtype[np.float64]] | None = None

    def adds(self, merit: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
        """Keep a merit unless a kept merit matches it in every entry; return whether it was kept."""
        if self._rows is not None and bool(np.any(np.all(self._rows >= merit * (1.0 - _EPSILON), axis=1))):
            return False
        self._rows = merit[None, :] if self._rows is None else np.vstack([self._rows, merit])
        return True


def _dominance_key(pattern: ReplicaPattern, demands: Sequence[Demand]) -> tuple[float, ...]:
    """Return the rates of the demands, and the unused replicas of demands with a limit on replicas."""
    rates, count = pattern.rates(), Counter(one.model for one in pattern.partition.replicas)
    # Counted down from the maximum of a partition: more is better in all entries.
    few = (float(MPS_CLIENTS - count[one.model]) for one in demands if one.max_replicas is not None)
    return (*(rates.get(one.model, 0.0) for one in demands), *few)
