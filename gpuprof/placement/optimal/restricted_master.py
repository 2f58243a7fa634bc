"""The restricted master problem of the optimal policy: segments for each demand and configurations of the devices.

Columns are, for each class of equal demands, its minimal covers (so that the bound already includes rounding a demand
up to whole segments), or with too many covers the segments themselves; for each kind of device its configurations (MIG
instances at legal starts, or the whole device); and for each partition its slots: a share and, where the memory of a
partition might not suffice, memory. Rows require as many partitions as patterns, and as many slots of each size as the
covers take. This is the Dantzig-Wolfe form of the packing problem, whose relaxation is close to the integer optimum.

Patterns of partitions that are too many to list are found by pricing: the relaxation's duals price a slot of every
size, and the pricing problem is a knapsack over shares, and over memory too where memory counts. Its best pattern
enters the program when it is worth more than its partition costs. When no pattern does, the relaxation is solved over
all patterns. Before that, and after a time limit, the duals still give a bound (Farley 1990, "A note on bounding a
class of linear programming problems": dual prices scaled down until no column beats its cost are feasible in the dual).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.machine.machine_code import compile_untimed
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

#: Maximum number of columns of covers of a program; further classes are given by their segments.
_MOST_COVERS = 40_000


@dataclass(frozen=True, slots=True)
class DemandClass:
    """Similar demands: the same rate and the same segments."""

    demands: tuple[Demand, ...]
    segments: tuple[Segment, ...]  # of its first demand

    @property
    def rate_rps(self) -> float:
        """Rate of each demand."""
        return self.demands[0].rate_rps


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

    covers: Mapping[str, tuple[int, ...]]  #: Multiplicity of each segment of its class, by model.
    configurations: tuple[tuple[DeviceConfiguration, int], ...]  #: Number of devices with each configuration.
    patterns: tuple[tuple[SharePattern, int], ...]  #: Patterns of the partitions.
    grids: Mapping[PartitionKind, MemoryGrid]  #: Units of the memory of their slots.


def group_demands(demands: Sequence[Demand], segments: Mapping[str, Sequence[Segment]]) -> tuple[DemandClass, ...]:
    """Group equal demands, in the order of the first demand of each group."""
    groups: dict[object, list[Demand]] = {}
    for demand in demands:
        figures = tuple((s.device, s.share, s.capacity_rps, s.memory_bytes) for s in segments[demand.model])
        key = (demand.rate_rps, demand.max_replicas, demand.priority, demand.min_goodput_rps, figures)
        groups.setdefault(key, []).append(demand)
    return tuple(DemandClass(tuple(group), tuple(segments[group[0].model])) for group in groups.values())


def served_column(program: Program, demand: Demand, rate: int, *, floors: bool = True) -> int:
    """Add the column of the served rate, taken from the row ``rate``; with a floor, it is zero or at least the
    floor.
    """
    entries = {rate: -1.0}
    if demand.min_goodput_rps and floors:
        floor, ceiling = program.row(low=0.0), program.row(high=0.0)
        entries |= {floor: 1.0, ceiling: 1.0}
        # 0 or 1: the served rate is then 0, or between the floor and the demand's rate.
        program.column(0.0, {floor: -demand.min_goodput_rps, ceiling: -demand.rate_rps}, 1.0)
    return program.column(0.0, entries, demand.rate_rps, integer=False)


@dataclass(slots=True)
class RestrictedMaster:
    """The program for some classes of demands on the devices of a fleet."""

    entries: Sequence[FleetEntry]
    classes: Sequence[DemandClass]
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
    _patterns: dict[SharePattern, int] = field(default_factory=dict)
    _fleet_rows: dict[str, int] = field(default_factory=dict)
    _covers: list[list[tuple[tuple[int, ...], int]]] = field(default_factory=list)
    _counts: list[dict[int, list[int]]] = field(default_factory=list)
    _served: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        uses = list(dict.fromkeys(_ResourceUse.of(segment) for group in self.classes for segment in group.segments))
        for entry in self.entries:
            part = (use for use in uses if use.device == entry.device.name)
            self._add_device(entry, sorted(part, key=lambda use: (use.share.mig or "", use.share.sm_pct, use.memory)))
        left = _MOST_COVERS
        for group in self.classes:
            left -= self._add_class(group, left)

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
            patterns = None if self.relaxed else packer.list_maximal()
            if patterns is not None:
                break
        return packer, patterns

    def _add_sum(self, kind: PartitionKind, capacity: int) -> None:
        """Bound a partition's contents only by the shares and memory of whole partitions on average."""
        shares, memory = self.program.row(low=0.0), self.program.row(low=0.0)
        self._sums[kind] = shares, memory
        self.program.column(0.0, {self.kind_rows[kind]: -1.0, shares: 100.0, memory: float(capacity)})

    def add_pattern(self, pattern: SharePattern) -> bool:
        """Add a column for a partition's pattern; return False when the column exists already."""
        if pattern in self._patterns:
            return False
        device, _ = pattern.kind
        entries = {self._slots[device, slot]: float(n) for slot, n in pattern.slots}
        entries[self.kind_rows[pattern.kind]] = -1.0
        self._patterns[pattern] = self.program.column(0.0, entries)
        return True

    def slot_values(self, kind: PartitionKind, duals: Sequence[float]) -> dict[PartitionSlot, float]:
        """Return the worth of a slot of each size of a partition by the duals."""
        return {slot: duals[self._slots[kind[0], slot]] for slot in self.packers[kind].slots}

    def _takes(self, segments: Sequence[Segment], counts: Sequence[int]) -> dict[int, float]:
        """Return the entries of a column that takes segments from the devices' rows."""
        entries: defaultdict[int, float] = defaultdict(float)
        for segment, count in zip(segments, counts, strict=True):
            if not count:
                continue
            kind = (segment.device, segment.share.mig)
            if kind in self._sums:
                shares, memory = self._sums[kind]
                entries[shares] -= count * segment.share.sm_pct
                entries[memory] -= count * float(segment.memory_bytes or 0)
            else:
                slot = PartitionSlot(segment.share, self.grids[kind].count(segment.memory_bytes))
                entries[self._slots[segment.device, slot]] -= count
        return {row: value for row, value in entries.items() if value}

    def _add_class(self, group: DemandClass, most: int) -> int:
        """Add the columns of a class; return the number of its covers."""
        capacities = [segment.capacity_rps for segment in group.segments]
        covers = None
        if not (self.partial or self.relaxed) and most > 0:
            covers = minimal_covers(group.rate_rps, capacities, group.demands[0].max_replicas)
        self._covers.append([])
        self._counts.append({})
        self._served.append([])
        if covers is None:
            for position in range(len(group.demands)):
                self._add_single(group, position)
            return 0
        row = self.program.row(len(group.demands), len(group.demands))
        for counts in covers:
            column = self.program.column(0.0, {row: 1.0, **self._takes(group.segments, counts)})
            self._covers[-1].append((counts, column))
        return len(covers)

    def _add_single(self, group: DemandClass, position: int) -> None:
        """Add columns for the multiplicity of each segment of a single demand."""
        demand = group.demands[position]
        # A little less, as for covers: the rates of whole segments may reach it only up to rounding.
        rate = self.program.row(low=0.0 if self.partial else demand.rate_rps * (1.0 - 1e-9))
        parts = {} if demand.max_replicas is None else {self.program.row(high=demand.max_replicas): 1.0}
        columns = []
        for index, segment in enumerate(group.segments):
            unit = [0] * len(group.segments)
            unit[index] = 1
            entries = {**self._takes(group.segments, unit), rate: segment.capacity_rps, **parts}
            high = math.ceil(demand.rate_rps / segment.capacity_rps)
            columns.append(self.program.column(0.0, entries, high))
        self._counts[-1][position] = columns
        if self.partial:
            self._served[-1].append(served_column(self.program, demand, rate, floors=self.floors))

    def served_columns(self) -> list[tuple[Demand, int]]:
        """Return the columns of the served rates of a partial program, by demand."""
        pairs = zip(self.classes, self._served, strict=True)
        return [pair for group, columns in pairs for pair in zip(group.demands, columns, strict=True)]

    def device_costs(self, prices: Mapping[str, float]) -> dict[int, float]:
        """Return the price of every column taking a device."""
        return {column: prices[configuration.device] for configuration, column in self._configurations}

    def configuration_duals(self, duals: Sequence[float]) -> list[tuple[DeviceConfiguration, float]]:
        """Return the configurations of devices with the dual of their fleet's count, 0.0 without a count."""
        rows = self._fleet_rows
        return [
            (configuration, duals[rows[configuration.device]] if configuration.device in rows else 0.0)
            for configuration, _ in self._configurations
        ]

    def read_solution(self, solution: Solution) -> Choice:
        """Translate a solution into segments, configurations and patterns."""
        counts_by_model: dict[str, tuple[int, ...]] = {}
        for group, covers, counts in zip(self.classes, self._covers, self._counts, strict=True):
            cover_counts = Counter({cover: int(solution.values[column]) for cover, column in covers})
            cover_queue = iter([cover for cover, times in cover_counts.items() for _ in range(times)])
            for position, demand in enumerate(group.demands):
                if position in counts:
                    counts_by_model[demand.model] = tuple(int(solution.values[column]) for column in counts[position])
                else:
                    counts_by_model[demand.model] = next(cover_queue)
        return Choice(
            covers=counts_by_model,
            configurations=tuple(
                (configuration, int(solution.values[c]))
                for configuration, c in self._configurations
                if solution.values[c] > 0.5
            ),
            patterns=tuple(
                (pattern, int(solution.values[c])) for pattern, c in self._patterns.items() if solution.values[c] > 0.5
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
    """Return the worth of a partition's best pattern; 0.0 where all patterns are listed and its dual suffices."""
    if kind not in master.generated:
        return 0.0
    return master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))[1]


def _add_columns(master: RestrictedMaster, solution: Solution, values: dict[PartitionKind, float]) -> bool:
    """Add the patterns that are worth more than their partition costs; return whether there were any."""
    has_new = False
    for kind in sorted(master.generated, key=str):
        cost = solution.duals[master.kind_rows[kind]]
        if values[kind] > cost + EXACT * max(1.0, math.fabs(cost)):
            pattern, _ = master.packers[kind].best_pattern(master.slot_values(kind, solution.duals))
            has_new = master.add_pattern(pattern) or has_new
    return has_new


def minimal_covers(
    rate: float, capacities: Sequence[float], most_parts: int | None = None, limit: int = 500
) -> list[tuple[int, ...]] | None:
    """Return the counts of each capacity in every minimal cover, where no segment can be left out.

    Parameters
    ----------
    capacities : sequence of float, length n
        Above zero, in any order.
    most_parts : int, optional
        Maximum number of segments in a cover.
    limit : int
        None is returned when there are more covers than this.

    Returns
    -------
    list of tuple of int, length n
        The counts in the order of ``capacities``.
    """
    order = np.argsort(-np.array(capacities, dtype=np.float64), kind="stable")
    sorted_capacities = np.array(capacities, dtype=np.float64)[order]
    listed_counts = np.zeros((limit, len(capacities)), dtype=np.int64)
    parts = math.inf if most_parts is None else float(most_parts)
    # Slightly less than the rate: three segments of a third each must cover it.
    count = _compile_fill()(rate * (1.0 - 1e-9), sorted_capacities, parts, listed_counts)
    if count < 0:
        return None
    covers = np.empty_like(listed_counts[:count])
    covers[:, order] = listed_counts[:count]
    return [tuple(counts) for counts in covers.tolist()]


def _fill_covers(rate: float, rates: npt.NDArray[np.float64], parts: float, covers: npt.NDArray[np.int64]) -> int:
    """Write the covers into the rows of ``covers`` and return their number, -1 where there are too few rows.

    Since capacities fall, a cover is minimal when its last segment is needed.
    """
    sizes = len(rates)
    counts = np.zeros(sizes, dtype=np.int64)
    rests, free_parts = np.empty(sizes + 1), np.empty(sizes + 1)
    rests[0], free_parts[0] = rate, parts
    depth, cover_count = 0, 0
    while True:
        need = rests[depth]
        if need > 0.0 and depth < sizes and free_parts[depth] >= 1.0 and need <= rates[depth] * free_parts[depth]:
            times = math.ceil(need / rates[depth])
            counts[depth] = times if times <= free_parts[depth] else int(free_parts[depth])
            if depth < sizes - 1 or counts[depth] == times:
                rests[depth + 1] = need - counts[depth] * rates[depth] if depth < sizes - 1 else 0.0
                free_parts[depth + 1] = free_parts[depth] - counts[depth]
                depth += 1
                continue
        elif need <= 0.0:
            if cover_count == len(covers):
                return -1
            covers[cover_count, :depth] = counts[:depth]
            cover_count += 1
        depth = min(depth, sizes - 1) - 1  # fewer of the last size never suffice
        while depth >= 0 and counts[depth] == 0:
            depth -= 1
        if depth < 0:
            return cover_count
        counts[depth] -= 1
        rests[depth + 1] = rests[depth] - counts[depth] * rates[depth]
        free_parts[depth + 1] = free_parts[depth] - counts[depth]
        depth += 1


@cache
def _compile_fill() -> Callable[[float, npt.NDArray[np.float64], float, npt.NDArray[np.int64]], int]:
    """Return `_fill_covers` in machine code: it tries hundreds of thousands of combinations for each program."""
    return compile_untimed(_fill_covers)  # numba takes long to import
