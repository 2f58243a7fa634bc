"""The integer program of a few devices without MIG, with a variable for each segment on each device.

It needs no generated patterns, and counts memory in bytes. Its devices are interchangeable, so it suits only a few of
them; there it finds maps the patterns of a relaxation do not add up to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.memory_grid import MemoryGrid
from gpuprof.placement.optimal.pattern import DeviceConfiguration, PartitionKind, PartitionSlot, SharePattern
from gpuprof.placement.optimal.restricted_master import Choice, DemandClass, served_column
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution

#: Maximum number of devices and of variables of the program.
_MOST_DEVICES, _MOST_COLUMNS = 4, 500
_GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class _Column:
    """Column that counts a segment of a demand on a device."""

    device: int
    model: str
    segment: int
    column: int


@dataclass(slots=True)
class CompactProgram:
    """Serves demands in part on a counted fleet (`gpuprof.placement.optimal.goodput.PartialProgram`)."""

    entries: Sequence[FleetEntry]
    classes: Sequence[DemandClass]
    program: Program = field(default_factory=Program)
    _devices: list[tuple[FleetEntry, int]] = field(default_factory=list)
    _columns: list[_Column] = field(default_factory=list)
    _served: list[tuple[Demand, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = []
        for entry in self.entries:
            for _ in range(entry.count or 0):
                # A used device holds at most its capacity, an unused device nothing.
                shares, memory = self.program.row(high=0.0), self.program.row(high=0.0)
                taken = {shares: -100.0, memory: -entry.device.dram_bytes / _GIB}
                self._devices.append((entry, self.program.column(0.0, taken, 1.0)))
                rows.append((shares, memory))
        for group in self.classes:
            for demand in group.demands:
                self._add_demand(group, demand, rows)

    def _add_demand(self, group: DemandClass, demand: Demand, rows: Sequence[tuple[int, int]]) -> None:
        rate = self.program.row(low=0.0)
        parts = {} if demand.max_replicas is None else {self.program.row(high=demand.max_replicas): 1.0}
        for number, ((entry, _), (shares, memory)) in enumerate(zip(self._devices, rows, strict=True)):
            for index, segment in enumerate(group.segments):
                if segment.device != entry.device.name:
                    continue
                held = (segment.memory_bytes or 0) / _GIB
                entries = {shares: segment.share.sm_pct, memory: held, rate: segment.capacity_rps, **parts}
                high = math.ceil(demand.rate_rps / segment.capacity_rps)
                self._columns.append(_Column(number, demand.model, index, self.program.column(0.0, entries, high)))
        self._served.append((demand, served_column(self.program, demand, rate)))

    def served_columns(self) -> Sequence[tuple[Demand, int]]:
        """Return the columns of the served rates by demand."""
        return self._served

    def device_costs(self, prices: Mapping[str, float]) -> Mapping[int, float]:
        """Return the price of every column taking a device."""
        return {column: prices[entry.device.name] for entry, column in self._devices}

    def read_solution(self, solution: Solution) -> Choice:
        """Translate a solution into segments, configurations and patterns."""
        segments = {demand.model: group.segments for group in self.classes for demand in group.demands}
        covers = {model: [0] * len(own) for model, own in segments.items()}
        slots: list[Counter[PartitionSlot]] = [Counter() for _ in self._devices]
        for segment_column in self._columns:
            times = round(solution.values[segment_column.column])
            segment = segments[segment_column.model][segment_column.segment]
            if times:
                covers[segment_column.model][segment_column.segment] += times
                slots[segment_column.device][PartitionSlot(segment.share, segment.memory_bytes or 0)] += times
        used = [(entry.device.name, held) for (entry, _), held in zip(self._devices, slots, strict=True) if held]
        kinds: list[PartitionKind] = [(name, None) for name, _ in used]
        return Choice(
            covers={model: tuple(counts) for model, counts in covers.items()},
            configurations=tuple((DeviceConfiguration(name), 1) for name, _ in used),
            patterns=tuple(
                (SharePattern(kind, tuple(held.items())), 1) for kind, (_, held) in zip(kinds, used, strict=True)
            ),
            grids={(e.device.name, None): MemoryGrid(1, e.device.memory_bytes(Share())) for e in self.entries},
        )


def is_compact(entries: Sequence[FleetEntry], classes: Sequence[DemandClass]) -> bool:
    """Return whether the program of a counted fleet is small enough, with no device divided into instances."""
    count = sum(entry.count if entry.count is not None else _MOST_DEVICES + 1 for entry in entries)
    segments = [(one, len(group.demands)) for group in classes for one in group.segments]
    columns = count * sum(times for _, times in segments)
    return count <= _MOST_DEVICES and columns <= _MOST_COLUMNS and all(one.share.mig is None for one, _ in segments)


def find_cheaper(problem: Problem, classes: Sequence[DemandClass], below: float, limit: Limit) -> Choice | None:
    """Return the cheapest choice serving all demands for less than ``below``; None where the program has none.

    The program is solved only where few enough devices cost less than ``below``.
    """
    entries = [
        replace(entry, count=min(entry.count if entry.count is not None else _MOST_DEVICES + 1, affordable))
        for entry in problem.fleet.entries
        if (affordable := math.ceil(min(below / entry.price_per_hour, _MOST_DEVICES + 2.0) * (1.0 - EXACT)) - 1) > 0
    ]
    if not entries or not is_compact(entries, classes):
        return None
    compact = CompactProgram(entries, classes)
    costs = compact.device_costs({entry.device.name: entry.price_per_hour for entry in entries})
    budget = compact.program.row(high=below * (1.0 - EXACT))
    for column, price in costs.items():
        compact.program.add(column, budget, price)
    for demand, column in compact.served_columns():
        compact.program.add(column, compact.program.row(low=demand.rate_rps), 1.0)
    compact.program.recost(costs)
    solution = compact.program.solve(time_limit_s=limit.left_s, seed=problem.options.seed)
    return None if solution is None else compact.read_solution(solution)
