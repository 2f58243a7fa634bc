"""Maps of many demands by queues where neighbours act through sums: column generation with `QueueTables`.

Each replica has requests of its own: those of a whole demand, or of one of a few equal parts of it. The queues of every
partition that is chosen from are solved, whatever the tables say; where they are too slow, shares are raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from gpuprof.errors import InputError
from gpuprof.placement.limit import TimeUpError
from gpuprof.placement.optimal.class_program import DemandPart, PartPattern, Split
from gpuprof.placement.optimal.partition_planner import PartitionPlanner, Task
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.optimal.queue_tables import QueueTables
from gpuprof.placement.optimal.table_pricing import make_table_pricing
from gpuprof.placement.optimal.table_search import TableSearch
from gpuprof.placement.placement import PlacedGpu

#: Into how many replicas a demand is split until one of them fits a device, and then once more.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: A replica that takes no more of a device alone is not divided further.
_SMALL = 0.3
#: Part of the time for patterns, before the program in whole numbers.
_FOR_PATTERNS = 0.6
#: Part of the time from then on for the programs in whole numbers.
_FOR_PROGRAM = 0.3
#: Patterns that the program in whole numbers has the choice of, for each part, first and then.
_CHOSEN_PER_PART = (2, 8)


@dataclass(slots=True)
class QueueSearch(TableSearch):
    """Searches maps of one problem without a latency budget; ``kinds`` are left empty."""

    known: Sequence[
        PlacedGpu
    ] = ()  #: A map for streams of the replicas' own, whose partitions are chosen from as well.
    _planner: PartitionPlanner = field(init=False)
    _standing: dict[PartPattern, PartPattern] = field(default_factory=dict)  #: Of the known map.
    _kept: dict[PartPattern, PartPattern | None] = field(default_factory=dict)

    def search(self) -> tuple[PlacedGpu, ...] | None:
        """Return a map that serves all demands; None where none is found."""
        self._planner = PartitionPlanner(self.problem, self.segments)
        limit = self.limit.keeping((1.0 - _FOR_PATTERNS) * (self.limit.left_s or 0.0))
        program, splits = None, list[Split]()
        with self.problem.limits.until(limit), suppress(TimeUpError, InputError):
            parts = self._tabulate(QueueTables(self.problem, self.segments))
            if {one.model for one in parts} < set(self._classes):
                return None
            splits = [(part,) * part.divisor for part in parts]
            program = self._make_program(splits, ())
            for pattern in self._list_known(parts):
                program.add(pattern)
                self._standing[pattern] = self._kept[pattern] = pattern
            program = self._generate(program, limit, by_class=False)
        if program is None:
            return None
        with self.problem.limits.until(self.limit), suppress(TimeUpError):
            return self._solve(program, splits)
        return None

    def _tabulate(self, tables: QueueTables) -> Sequence[DemandPart]:
        """Return the parts that demands may be split into, and keep how they are priced on each kind of device."""
        parts = [part for model in self._classes for part in self._list_parts(tables, model)]
        for entry in self.problem.fleet.entries:
            kind = tables.tabulate(entry, parts)
            if kind is not None:
                pricing = make_table_pricing(self.segments, entry.device, kind, parts, range(len(parts)))
                self._pricings[entry.device.name, None] = pricing
        return parts

    def _list_parts(self, tables: QueueTables, model: str) -> Sequence[DemandPart]:
        found: list[DemandPart] = []
        for divisor in _DIVISORS:
            part = DemandPart(model, divisor)
            if divisor > (self.problem.demand(model).max_replicas or math.inf):
                break
            least = min(tables.least_fraction(entry, part) for entry in self.problem.fleet.entries)
            if math.isfinite(least):
                found.append(part)
            if least <= _SMALL or len(found) > 1:
                break
        return found

    def _list_known(self, parts: Sequence[DemandPart]) -> Iterator[PartPattern]:
        """Yield the partitions of the known map whose replicas serve parts."""
        rates = {(part.model, round(self._task(part)[1], 9)): part for part in parts}
        for gpu in self.known:
            for partition in gpu.partitions:
                keys = [(self.segments.first_alike(one.model), round(one.rate_rps, 9)) for one in partition.replicas]
                if all(key in rates for key in keys):
                    replicas = tuple(
                        replace(one, model=model) for one, (model, _) in zip(partition.replicas, keys, strict=True)
                    )
                    standing = replace(partition, replicas=replicas)
                    yield PartPattern(ReplicaPattern(gpu.device, standing), tuple(rates[key] for key in keys))

    def _choose(self, ranked: Sequence[PartPattern], number: int) -> Sequence[PartPattern]:
        """Return patterns that keep their SLOs by their queues: first those that make a map, then as time allows."""
        limit = self.limit.keeping(_FOR_PROGRAM * (self.limit.left_s or 0.0))
        needed = [*self._standing, *(one for one in ranked if len(one.parts) == 1 and one not in self._standing)]
        others = (one for one in ranked if len(one.parts) > 1 and one not in self._standing)
        chosen: list[PartPattern] = []
        for pattern in chain(needed, islice(others, _CHOSEN_PER_PART[number] * len(needed))):
            if self._standing and limit.is_over:
                break
            if pattern not in self._kept:
                self._kept[pattern] = pattern if self._holds(pattern) else self._mend(pattern)
            mended = self._kept[pattern]
            if mended is not None:
                self._kept[mended] = mended
                chosen.append(mended)
        return chosen

    def _holds(self, pattern: PartPattern) -> bool:
        if pattern in self._kept:
            return self._kept[pattern] == pattern
        device, partition = self.problem.device(pattern.pattern.device), pattern.pattern.partition
        if sum(one.memory_bytes or 0 for one in partition.replicas) > device.dram_bytes:
            return False
        return all(
            self.segments.meets(
                self.problem.demand(one.model), device, one.workload, one.rate_rps, partition.beside(one)
            )
            for one in partition.replicas
        )

    def _mend(self, pattern: PartPattern) -> PartPattern | None:
        by_task = sorted(pattern.parts, key=self._task)
        device = self.problem.device(pattern.pattern.device)
        planned = self._planner.plan(device, None, [self._task(one) for one in by_task])
        return None if planned is None else PartPattern(ReplicaPattern(device.name, planned), tuple(by_task))

    def _task(self, part: DemandPart) -> Task:
        return part.model, self.problem.demand(part.model).rate_rps * part.fraction
