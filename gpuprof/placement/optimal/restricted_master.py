"""The restricted master problem of the optimal policy: segments for each demand and configurations of the devices.

Columns are, for each demand, its segments; for each kind of device its configurations (MIG instances at legal starts,
or the whole device); and for each partition its slots: a share and, where the memory of a partition might not suffice,
memory. Rows require as many partitions as patterns, and as many slots of each size as the segments take. This is the
Dantzig-Wolfe form of the packing problem, whose relaxation is close to the integer optimum.

Patterns of partitions that are too many to list are found by pricing: the relaxation's duals price a slot of every
size, and the pricing problem is a knapsack over shares, and over memory too where memory counts. Its best pattern
enters the program when it is worth more than its partition costs. When no pattern does, the relaxation is solved over
all patterns. Before that, and after a time limit, the duals still give a bound (Farley 1990, "A note on bounding a
class of linear programming problems": dual prices scaled down until no column beats its cost are feasible in the dual).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.pattern import (
    SPACE,
    DeviceConfiguration,
    MemoryGrid,
    PartitionKind,
    PartitionSlot,
    PatternPacker,
    SharePattern,
    is_binding,
    list_configurations,
    make_grid,
    share_units,
)
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.segment import Segment


@dataclass(frozen=True, slots=True)
class _ResourceUse:
    """Resources of a device that segments take."""

    device: str
    share: Share
    memory: int

    @classmethod
    def of(cls, segment: Segment) -> _ResourceUse:
        """Return the resources that ``segment`` takes; unknown memory is treated as none."""
        return cls(segment.device, segment.share, segment.memory_bytes or 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """A solution of the program."""

    counts: Mapping[str, tuple[int, ...]]  #: Multiplicity of each segment, by model.
    configurations: tuple[tuple[DeviceConfiguration, int], ...]  #: Number of devices with each configuration.
    patterns: tuple[tuple[SharePattern, int], ...]  #: Patterns of the partitions.
    grids: Mapping[PartitionKind, MemoryGrid]  #: Units of the memory of their slots.


def served_column(program: Program, demand: Demand, rate: int, *, floors: bool = True) -> int:
    """Add the column of the served rate, an entry of the row ``rate``; with a floor, it is zero or at least that."""
    entries = {rate: -1.0}
    if demand.min_goodput_rps and floors:
        floor, ceiling = program.row(low=0.0), program.row(high=0.0)
        entries |= {floor: 1.0, ceiling: 1.0}
        # 0 or 1: the served rate is then 0, or between the floor and the demand's rate.
        program.column(0.0, {floor: -demand.min_goodput_rps, ceiling: -demand.rate_rps}, 1.0)
    return program.column(0.0, entries, demand.rate_rps, integer=False)


@dataclass(slots=True)
class RestrictedMaster:
    """The program for some demands on the devices of a fleet."""

    entries: Sequence[FleetEntry]
    demands: Sequence[Demand]
    choices: Mapping[str, Sequence[Segment]]  #: Segments of each demand, by model.
    #: Demands may be served in part; the objective is then the served rate (see `maximise_goodput`), else the cost.
    partial: bool = False
    #: Where patterns are too many to list, only the sums of shares and memory are bounded: a relaxation needing no
    #: generation.
    summed: bool = False
    #: True if a demand of a partial program below its ``min_goodput_rps`` is treated as unserved.
    floors: bool = True
    #: Round memory that is too large to count exactly down, for a bound; else up, for feasible packings.
    relaxed: bool = False
    program: Program = field(default_factory=Program)
    #: ``kind_rows``, ``packers``: the rows of the partitions whose patterns mix shares of models, and their packers.
    kind_rows: dict[PartitionKind, int] = field(default_factory=dict)
    packers: dict[PartitionKind, PatternPacker] = field(default_factory=dict)
    grids: dict[PartitionKind, MemoryGrid] = field(default_factory=dict)
    #: Partitions among these whose patterns were not all listed.
    generated: set[PartitionKind] = field(default_factory=set)
    _sums: dict[PartitionKind, tuple[int, int]] = field(default_factory=dict)
    _slots: dict[tuple[str, PartitionSlot], int] = field(default_factory=dict)
    _configurations: list[tuple[DeviceConfiguration, int]] = field(default_factory=list)
    patterns: dict[SharePattern, int] = field(default_factory=dict)  #: Columns of the patterns.
    _fleet_rows: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, list[int]] = field(default_factory=dict)
    #: The columns of the served rates of a partial program, by demand.
    served_columns: list[tuple[Demand, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        uses = list(dict.fromkeys(_ResourceUse.of(segment) for d in self.demands for segment in self.choices[d.model]))
        for entry in self.entries:
            part = (use for use in uses if use.device == entry.device.name)
            self._add_device(entry, sorted(part, key=lambda use: (use.share.mig or "", use.share.sm_pct, use.memory)))
        for demand in self.demands:
            self._add_demand(demand)

    @property
    def is_exact(self) -> bool:
        """Return whether all memory is counted in bytes."""
        return all(grid.is_exact for grid in self.grids.values())

    def _add_device(self, entry: FleetEntry, uses: Sequence[_ResourceUse]) -> None:
        for mig in dict.fromkeys(use.share.mig for use in uses):
            self._add_kind(entry, (entry.device.name, mig), [use for use in uses if use.share.mig == mig])
        count = {}
        if uses and entry.count is not None:
            row = self.program.row(high=entry.count)
            self._fleet_rows[entry.device.name] = row
            count = {row: 1.0}
        for configuration in list_configurations(entry.device, [use.share for use in uses]):
            kind_rows = {self.kind_rows[kind]: float(n) for kind, n in configuration.partitions().items()}
            cost = 0.0 if self.partial else entry.price_per_hour
            self._configurations.append((configuration, self.program.column(cost, {**kind_rows, **count})))

    def _add_kind(self, entry: FleetEntry, kind: PartitionKind, uses: Sequence[_ResourceUse]) -> None:
        self.kind_rows[kind] = self.program.row(low=0.0)
        capacity = entry.device.memory_bytes(Share(100.0, kind[1]))
        packer, patterns = self._count_memory(kind, uses, capacity)
        if patterns is None and self.summed:
            self._add_sum(kind, capacity)
            return
        self.packers[kind] = packer
        for slot in packer.slots:
            self._slots[kind[0], slot] = self.program.row(low=0.0)
        if patterns is None:
            self.generated.add(kind)
        for pattern in packer.initial_patterns() if patterns is None else patterns:
            self.add_pattern(pattern)

    def _count_memory(
        self, kind: PartitionKind, uses: Sequence[_ResourceUse], capacity: int
    ) -> tuple[PatternPacker, tuple[SharePattern, ...] | None]:
        """Choose the units of memory: none, bytes where the patterns can then be listed, else steps."""
        units = [share_units(use.share) for use in uses]
        binding = is_binding(units, [use.memory for use in uses], SPACE, capacity)
        grids = [MemoryGrid(1, capacity)] if binding else [MemoryGrid()]
        if binding and not self.summed:
            grids.append(make_grid(capacity, SPACE // math.gcd(SPACE, *units), relaxed=self.relaxed))
        for grid in grids:
            slots = tuple(dict.fromkeys(PartitionSlot(use.share, grid.count(use.memory)) for use in uses))
            self.grids[kind] = grid
            packer = PatternPacker(kind, slots, grid.capacity)
            patterns = None if self.relaxed and binding else packer.list_maximal()
            if patterns is not None:
                break
        return packer, patterns

    def _add_sum(self, kind: PartitionKind, capacity: int) -> None:
        """Bound a partition's contents only by the total share and memory of whole partitions."""
        shares, memory = self.program.row(low=0.0), self.program.row(low=0.0)
        self._sums[kind] = shares, memory
        self.program.column(0.0, {self.kind_rows[kind]: -1.0, shares: 100.0, memory: float(capacity)})

    def add_pattern(self, pattern: SharePattern) -> bool:
        """Add a column for a partition's pattern; return False when the column exists already."""
        if pattern in self.patterns:
            return False
        device, _ = pattern.kind
        entries = {self._slots[device, slot]: float(n) for slot, n in pattern.slots}
        entries[self.kind_rows[pattern.kind]] = -1.0
        self.patterns[pattern] = self.program.column(0.0, entries)
        return True

    def slot_values(self, kind: PartitionKind, duals: Sequence[float]) -> dict[PartitionSlot, float]:
        """Return the worth of a slot of each size in a partition, from the duals."""
        return {slot: duals[self._slots[kind[0], slot]] for slot in self.packers[kind].slots}

    def _take(self, segment: Segment) -> dict[int, float]:
        """Return the entries of a segment's column in the rows of its device."""
        kind = (segment.device, segment.share.mig)
        if kind in self._sums:
            shares, memory = self._sums[kind]
            held = {memory: -float(segment.memory_bytes)} if segment.memory_bytes else {}
            return {shares: -segment.share.sm_pct, **held}
        slot = PartitionSlot(segment.share, self.grids[kind].count(segment.memory_bytes))
        return {self._slots[segment.device, slot]: -1.0}

    def _add_demand(self, demand: Demand) -> None:
        """Add columns for the multiplicity of each segment of a demand."""
        segments = self.choices[demand.model]
        # A little less: the rates of whole segments may reach it only up to rounding.
        rate = self.program.row(low=0.0 if self.partial else demand.rate_rps * (1.0 - 1e-9))
        replicas = {} if demand.max_replicas is None else {self.program.row(high=demand.max_replicas): 1.0}
        columns = []
        for segment in segments:
            entries = {**self._take(segment), rate: segment.capacity_rps, **replicas}
            columns.append(self.program.column(0.0, entries, math.ceil(demand.rate_rps / segment.capacity_rps)))
        self._counts[demand.model] = columns
        if self.partial:
            column = served_column(self.program, demand, rate, floors=self.floors)
            self.served_columns.append((demand, column))

    def device_costs(self, prices: Mapping[str, float]) -> dict[int, float]:
        """Return the price of every column taking a device."""
        return {column: prices[configuration.device] for configuration, column in self._configurations}

    def configuration_duals(self, duals: Sequence[float]) -> list[tuple[DeviceConfiguration, float]]:
        """Return each device configuration with the dual of its fleet's count limit, 0.0 without a limit."""
        rows = self._fleet_rows
        return [
            (configuration, duals[rows[configuration.device]] if configuration.device in rows else 0.0)
            for configuration, _ in self._configurations
        ]

    def read_solution(self, solution: Solution) -> Choice:
        """Translate a solution into segments, configurations and patterns; it may precede the last patterns."""
        return Choice(
            counts={
                model: tuple(int(solution.values[column]) for column in columns)
                for model, columns in self._counts.items()
            },
            configurations=tuple(
                (configuration, int(solution.values[c]))
                for configuration, c in self._configurations
                if solution.values[c] > 0.5
            ),
            patterns=tuple(
                (pattern, int(solution.values[c]))
                for pattern, c in self.patterns.items()
                if c < len(solution.values) and solution.values[c] > 0.5
            ),
            grids=self.grids,
        )


def solve_relaxation(
    master: RestrictedMaster, prices: dict[str, float], limit: Limit, seed: int = 0
) -> tuple[Solution | None, float]:
    """Solve the relaxation, adding patterns to ``master`` until none improves it or the time is up.

    Parameters
    ----------
    master : Master
        Its objective is the price of the devices.
    prices : mapping of str to float
        By device.

    Returns
    -------
    (Solution or None, float)
        None where the program has no solution with its present patterns; and a lower bound on every solution over all
        patterns.
    """
    best, solution = 0.0, None
    while True:
        # The first solve is not stopped: without it there is no bound at all, and it is short beside the others.
        left = None if solution is None else limit.left_s
        next_solution = master.program.solve(relaxed=True, time_limit_s=left, seed=seed)
        if next_solution is None or not next_solution.is_proven:
            return solution, best
        solution = next_solution
        values = {kind: _pattern_value(master, kind, next_solution) for kind in master.kind_rows}
        # The bound of a round is not monotone: an earlier bound may be higher, and all of them hold.
        best = max(best, farley_bound(master, prices, next_solution, values))
        if limit.is_over or not _add_columns(master, next_solution, values):
            return solution, best


def generate_patterns(master: RestrictedMaster, limit: Limit, seed: int = 0) -> None:
    """Add the patterns of the program's relaxation under its present objective, until the time is up."""
    while master.generated:
        solution = master.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=seed)
        if solution is None or not solution.is_proven or limit.is_over:
            return
        values = {kind: _pattern_value(master, kind, solution) for kind in master.kind_rows}
        if not _add_columns(master, solution, values):
            return


def farley_bound(
    master: RestrictedMaster, prices: dict[str, float], solution: Solution, values: dict[PartitionKind, float]
) -> float:
    """Return the bound on the cost that a relaxed solution's duals give.

    Each partition is priced at the worth of its best pattern. All duals are then scaled down by the factor that leaves
    no configuration of a device worth more than its price. Columns of covers cost nothing and stay feasible.
    """
    scale = 1.0
    for configuration, dual in master.configuration_duals(solution.duals):
        value = (
            sum(
                n * max(values[kind], solution.duals[master.kind_rows[kind]])
                for kind, n in configuration.partitions().items()
            )
            + dual
        )
        if value > prices[configuration.device]:
            scale = min(scale, prices[configuration.device] / value)
    return max(0.0, scale * solution.objective)


def _pattern_value(master: RestrictedMaster, kind: PartitionKind, solution: Solution) -> float:
    """Return the worth of a partition's best pattern; 0.0 if all patterns are listed, since its dual covers it."""
    if kind not in master.generated:
        return 0.0
    return master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))[1]


def _add_columns(master: RestrictedMaster, solution: Solution, values: dict[PartitionKind, float]) -> bool:
    """Add the patterns worth more than their partition costs; return whether any were added."""
    has_new = False
    for kind in sorted(master.generated, key=str):
        cost = solution.duals[master.kind_rows[kind]]
        if values[kind] > cost + EXACT * max(1.0, math.fabs(cost)):
            pattern, _ = master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))
            has_new = master.add_pattern(pattern) or has_new
    return has_new
