"""Maps of devices by what their replicas can serve: the program of `capacity_program` in whole numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.capacity_program import (
    WHOLE,
    CapacityColumns,
    CapacityPattern,
    CapacityRows,
    CapacitySplit,
)
from gpuprof.placement.optimal.demand_classes import group_alike
from gpuprof.placement.optimal.incumbent import sum_prices
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.neighbour_box import KindTable
from gpuprof.placement.optimal.table_search import trim_rates
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.segment import Segments

#: Patterns and splits of the first program in whole numbers, and its gap, to have a map in any case.
_FEW, _GAP = (40, 70), 6e-3

Column = TypeVar("Column")


def place_by_capacities(
    problem: Problem, segments: Segments, columns: CapacityColumns, limit: Limit
) -> tuple[PlacedGpu, ...] | None:
    """Return the cheapest devices that are found in time and serve all demands; None where none are.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    columns : CapacityColumns
        Of the classes and workloads of `gpuprof.placement.optimal.kind_table.tabulate_kinds`.
    limit : Limit
    """
    search = _CapacityMap(problem, segments, tabulate_kinds(problem, segments))
    patterns, splits = (max(pair) for pair in zip(_FEW, columns.taken, strict=True))
    few = replace(columns, patterns=columns.patterns[:patterns], splits=columns.splits[:splits])
    first = search.solve(few, _GAP, limit)
    if first is not None and limit.is_over:
        return first
    found = [one for one in (first, search.solve(columns, EXACT, limit)) if one is not None]
    return min(found, key=partial(sum_prices, problem), default=None)


@dataclass(slots=True)
class _CapacityMap:
    """Makes the devices of one problem."""

    problem: Problem
    segments: Segments
    kinds: Sequence[KindTable]
    _names: Sequence[Sequence[str]] = field(init=False)  #: Of the demands of each class.

    def __post_init__(self) -> None:
        classes = group_alike(self.problem, self.segments).values()
        self._names = [[one.model for one in own] for own in classes]

    def solve(self, columns: CapacityColumns, gap: float, limit: Limit) -> tuple[PlacedGpu, ...] | None:
        """Return the devices of the best solution in whole numbers that is found, up to a relative gap."""
        patterns = tuple(one for one in columns.patterns if self._holds(one))
        splits = tuple(one for one in columns.splits if self._may_split(one))
        rows = CapacityRows(CapacityColumns(patterns, splits), len(self._names))
        program = Program()
        for _ in rows.of_parts:
            program.row(low=0.0)
        for own in self._names:
            program.row(low=float(len(own)))
        entries = self.problem.fleet.entries
        counts = [{} if one.count is None else {program.row(high=float(one.count)): 1.0} for one in entries]
        taken = {
            program.column(entries[one.kind].price_per_hour, {**rows.enter_pattern(one), **counts[one.kind]}): one
            for one in patterns
        }
        served = {program.column(0.0, rows.enter_split(one)): one for one in splits}
        for replacement in rows.enter_replacements():
            program.column(0.0, replacement, integer=False)
        prices = {one.price_per_hour for one in entries}
        solution = program.solve(
            time_limit_s=limit.left_s,
            seed=self.problem.options.seed,
            gap=gap,
            least_step=min(prices) if len(prices) == 1 else 0.0,
        )
        return None if solution is None else self._make_devices(_repeat(taken, solution), _repeat(served, solution))

    def _holds(self, pattern: CapacityPattern) -> bool:
        """Whether all replicas keep their SLOs and find their memory."""
        names = [self._names[number][0] for number in pattern.classes]
        partition = PlacedPartition(
            tuple(self._make_replica(pattern, place, name) for place, name in enumerate(names) if pattern.parts[place])
        )
        device = self.problem.fleet.entries[pattern.kind].device
        memory = sum(one.memory_bytes or 0 for one in partition.replicas)
        return memory <= device.dram_bytes and self.segments.holds(device, partition)

    def _may_split(self, split: CapacitySplit) -> bool:
        """Whether a demand may have so many replicas."""
        most = self.problem.demand(self._names[split.number][0]).max_replicas
        return most is None or len(split.parts) <= most

    def _make_devices(
        self, patterns: Sequence[CapacityPattern], splits: Sequence[CapacitySplit]
    ) -> tuple[PlacedGpu, ...] | None:
        """Return the devices, each replica with a demand's name; None where they serve less than the splits ask."""
        asked: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        left = [list(own) for own in self._names]
        for split in splits:
            if left[split.number]:  # rows ask for at least as many demands as there are, not for as many
                name = left[split.number].pop()
                asked[split.number] += [(part, name) for part in split.parts]
        standing: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, pattern in enumerate(patterns):
            for place, (own, part) in enumerate(zip(pattern.classes, pattern.parts, strict=True)):
                standing[own].append((part, number, place))
        replicas: defaultdict[int, list[PlacedReplica]] = defaultdict(list)
        for own, needed in asked.items():
            # Who can serve most takes the largest part: where any assignment does, this one does.
            able = sorted(standing[own], reverse=True)
            needed.sort(reverse=True)
            if len(able) < len(needed) or any(one[0] < part for one, (part, _) in zip(able, needed, strict=False)):
                return None
            for (_, number, place), (_, name) in zip(able, needed, strict=False):
                replicas[number].append(self._make_replica(patterns[number], place, name))
        devices = [self.problem.fleet.entries[one.kind].device.name for one in patterns]
        gpus = [PlacedGpu(devices[number], (PlacedPartition(tuple(own)),)) for number, own in replicas.items()]
        return None if any(left) else trim_rates(self.problem, gpus)

    def _make_replica(self, pattern: CapacityPattern, place: int, name: str) -> PlacedReplica:
        device, one = self.problem.fleet.entries[pattern.kind].device, pattern.items[place]
        workload = self.kinds[pattern.kind].workloads[one]
        memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
        rate = self.problem.demand(name).rate_rps * pattern.parts[place] / WHOLE
        return PlacedReplica(name, workload.batch, workload.processes, workload.share, rate, memory_bytes=memory)


def _repeat(columns: Mapping[int, Column], solution: Solution) -> list[Column]:
    """Return each as often as the solution takes it."""
    return [one for column, one in columns.items() for _ in range(round(solution.values[column]))]
