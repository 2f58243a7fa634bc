"""The integer program behind the optimal policy: which segments serve each demand, and which patterns hold them.

Columns are, for each class of equal demands, its minimal covers (so that rounding a demand up to whole segments is in
the bound already), or where there are too many of those the segments themselves; and for each kind of device the
patterns that can be cut out of it. A row for every share says that the patterns have as many slots of it as the
covers take. This is the Dantzig-Wolfe form of the packing problem, whose relaxation is close to the integers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprof.demand import Demand
from gpuprof.fleet import FleetEntry
from gpuprof.placement.minimal_cover import minimal_covers
from gpuprof.placement.pattern import Pattern, mig_patterns, packing_patterns
from gpuprof.placement.program import Program, Solution
from gpuprof.placement.segment import Segment
from gpuprof.share import Share

Slot = tuple[str, Share]


@dataclass(frozen=True, slots=True)
class DemandClass:
    """Demands that are alike: the same rate and the same segments."""

    demands: tuple[Demand, ...]
    segments: tuple[Segment, ...]  # of the first of them

    @property
    def rate_rps(self) -> float:
        """Of each."""
        return self.demands[0].rate_rps


@dataclass(frozen=True, slots=True)
class Choice:
    """A solution of the program.

    Attributes
    ----------
    covers : mapping of str to tuple of int
        For each model how often each segment of its class is taken.
    patterns : tuple of (Pattern, int)
        How many devices are cut up in which way.
    shared : mapping of str to int
        Devices shared whole whose packing was only bounded, by device.
    solution : Solution
    """

    covers: Mapping[str, tuple[int, ...]]
    patterns: tuple[tuple[Pattern, int], ...]
    shared: Mapping[str, int]
    solution: Solution


def classes_of(demands: Sequence[Demand], segments: Mapping[str, Sequence[Segment]]) -> tuple[DemandClass, ...]:
    """Group equal demands; the order is that of the first of each."""
    groups: dict[object, list[Demand]] = {}
    for demand in demands:
        same = tuple((one.device, one.share, one.capacity_rps, one.memory_bytes) for one in segments[demand.model])
        key = (demand.rate_rps, demand.max_replicas, demand.priority, demand.min_goodput_rps, same)
        groups.setdefault(key, []).append(demand)
    return tuple(DemandClass(tuple(group), tuple(segments[group[0].model])) for group in groups.values())


@dataclass(slots=True)
class Master:
    """The program for some classes of demands on the devices of a fleet.

    Parameters
    ----------
    entries : sequence of FleetEntry
    classes : sequence of DemandClass
    partial : bool
        Demands may be served in part; the objective is then the served rate (see `maximise_goodput`), else the cost.
    """

    entries: Sequence[FleetEntry]
    classes: Sequence[DemandClass]
    partial: bool = False
    program: Program = field(default_factory=Program)
    _slots: dict[Slot, int] = field(default_factory=dict)
    _rooms: dict[str, tuple[int, int]] = field(default_factory=dict)
    _patterns: list[tuple[Pattern, int]] = field(default_factory=list)
    _shared: dict[str, int] = field(default_factory=dict)
    _covers: list[list[tuple[tuple[int, ...], int]]] = field(default_factory=list)
    _counts: list[dict[int, list[int]]] = field(default_factory=list)
    _served: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        used = {(one.device, one.share) for group in self.classes for one in group.segments}
        for entry in self.entries:
            own = (share for device, share in used if device == entry.device.name)
            self._add_device(entry, sorted(own, key=lambda share: (share.mig or "", share.sm_pct)))
        for group in self.classes:
            self._add_class(group)

    def _add_device(self, entry: FleetEntry, shares: Sequence[Share]) -> None:
        if not shares:
            return
        name, device = entry.device.name, entry.device
        for share in shares:
            self._slots[name, share] = self.program.row(low=0.0)
        count = {} if entry.count is None else {self.program.row(high=entry.count): 1.0}
        for pattern in mig_patterns(device, shares):
            self._add_pattern(pattern, entry, count)
        whole = [share for share in shares if share.mig is None]
        if not whole:
            return
        percent, memory = self.program.row(low=0.0), self.program.row(low=0.0)
        self._rooms[name] = (percent, memory)
        room = {percent: 100.0, memory: float(device.dram_bytes)}
        packings = packing_patterns(device, whole)
        if packings is None:
            for share in whole:
                del self._slots[name, share]
            cost = 0.0 if self.partial else entry.price_per_hour
            self._shared[name] = self.program.column(cost, {**room, **count})
            return
        for pattern in packings:
            self._add_pattern(pattern, entry, {**room, **count})

    def _add_pattern(self, pattern: Pattern, entry: FleetEntry, entries: Mapping[int, float]) -> None:
        slots = {self._slots[pattern.device, share]: float(count) for share, count in pattern.slots}
        cost = 0.0 if self.partial else entry.price_per_hour
        self._patterns.append((pattern, self.program.column(cost, {**slots, **entries})))

    def _takes(self, segments: Sequence[Segment], counts: Sequence[int]) -> dict[int, float]:
        """Return the entries of a column that takes segments from the devices' rows."""
        entries: defaultdict[int, float] = defaultdict(float)
        for segment, count in zip(segments, counts, strict=True):
            slot = self._slots.get((segment.device, segment.share))
            if slot is not None:
                entries[slot] -= count
            if segment.share.mig is None:
                percent, memory = self._rooms[segment.device]
                entries[percent] -= count * segment.share.sm_pct
                entries[memory] -= count * float(segment.memory_bytes or 0)
        return {row: value for row, value in entries.items() if value}

    def _add_class(self, group: DemandClass) -> None:
        capacities = [segment.capacity_rps for segment in group.segments]
        most = group.demands[0].max_replicas
        covers = None if self.partial else minimal_covers(group.rate_rps, capacities, most)
        self._covers.append([])
        self._counts.append({})
        self._served.append([])
        if covers is None:
            for position in range(len(group.demands)):
                self._add_single(group, position)
            return
        row = self.program.row(len(group.demands), len(group.demands))
        for counts in covers:
            column = self.program.column(0.0, {row: 1.0, **self._takes(group.segments, counts)})
            self._covers[-1].append((counts, column))

    def _add_single(self, group: DemandClass, position: int) -> None:
        """Add columns for how often each segment is taken for one demand."""
        demand = group.demands[position]
        rate = self.program.row(low=0.0 if self.partial else demand.rate_rps * (1.0 - 1e-9))
        parts = {} if demand.max_replicas is None else {self.program.row(high=demand.max_replicas): 1.0}
        columns = []
        for index, segment in enumerate(group.segments):
            unit = [0] * len(group.segments)
            unit[index] = 1
            taken = {**self._takes(group.segments, unit), rate: segment.capacity_rps, **parts}
            high = math.ceil(demand.rate_rps / segment.capacity_rps)
            columns.append(self.program.column(0.0, taken, high))
        self._counts[-1][position] = columns
        if self.partial:
            self._add_served(demand, rate)

    def _add_served(self, demand: Demand, rate: int) -> None:
        """Add the column of the rate that is served; with a floor it is all or nothing up to there."""
        entries = {rate: -1.0}
        if demand.min_goodput_rps:
            floor, ceiling = self.program.row(low=0.0), self.program.row(high=0.0)
            entries |= {floor: 1.0, ceiling: 1.0}
            self.program.column(0.0, {floor: -demand.min_goodput_rps, ceiling: -demand.rate_rps}, 1.0)
        column = self.program.column(0.0, entries, demand.rate_rps, integer=False)
        self._served[-1].append(column)

    def served_columns(self) -> list[tuple[Demand, int]]:
        """Return the columns of the served rates of a partial program, by demand."""
        pairs = zip(self.classes, self._served, strict=True)
        return [pair for group, columns in pairs for pair in zip(group.demands, columns, strict=True)]

    def costs(self) -> dict[int, float]:
        """Return the price of every device column."""
        prices = {entry.device.name: entry.price_per_hour for entry in self.entries}
        patterns = {column: prices[pattern.device] for pattern, column in self._patterns}
        return {**patterns, **{column: prices[name] for name, column in self._shared.items()}}

    def read(self, solution: Solution) -> Choice:
        """Translate a solution into segments and patterns."""
        chosen: dict[str, tuple[int, ...]] = {}
        for group, covers, counts in zip(self.classes, self._covers, self._counts, strict=True):
            taken = Counter({cover: int(solution.values[column]) for cover, column in covers})
            flat = iter([cover for cover, times in taken.items() for _ in range(times)])
            for position, demand in enumerate(group.demands):
                if position in counts:
                    chosen[demand.model] = tuple(int(solution.values[column]) for column in counts[position])
                else:
                    chosen[demand.model] = next(flat)
        return Choice(
            covers=chosen,
            patterns=tuple((p, int(solution.values[c])) for p, c in self._patterns if solution.values[c] > 0.5),
            shared={name: int(solution.values[column]) for name, column in self._shared.items()},
            solution=solution,
        )
