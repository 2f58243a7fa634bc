"""Maps for many demands of few classes: cutting stock over patterns of replicas with their neighbours.

Similar demands form a class of any number, and equal replicas serve each demand: its parts. A pattern is the content of
a device, every part with a share and a batch that keep its SLO with the others as neighbours. The duals of the
relaxation price the parts, `TablePricing` finds the patterns that are worth more than their device, and the integer
program chooses among the patterns of least reduced cost. This is a heuristic and proves nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Workload
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.demand_classes import DemandClasses, group_alike, number_classes
from gpuprof.placement.optimal.incumbent import sum_prices
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.pattern import SPACE
from gpuprof.placement.optimal.table_pricing import DemandPart, TablePricing, make_table_pricing
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.segment import Segments

#: Numbers of equal replicas that may serve a demand.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Splits are dropped above this multiple of the least part of a device for the demand.
_DEARER = 1.1
_MOST_ROUNDS = 60
#: Patterns a round of pricing adds.
_MOST_ADDED = 150
#: Patterns of the integer program: at first few and up to a gap, so that a map always exists.
_CHOSEN, _GAP = (120, 300), 6e-3
#: Weights of the classes' duals beside the parts' duals, in order: the parts' duals vary widely with few patterns.
_STABLE = (0.7, 0.4, 0.0)
_LITTLE = 1e-6
#: Processor time (s) of patterns, and of the first program, whatever the clock says; at most half of the limit each.
_LEAST_S = (2.5, 1.5)
#: Maximum number of repeated solves of the integer program without patterns breaking an SLO.
_MOST_REPAIRED = 5


@dataclass(frozen=True, slots=True)
class DevicePattern:
    """The replicas of a device."""

    entry: int  #: Number of the fleet's entry.
    parts: tuple[DemandPart, ...]  #: Sorted.
    workloads: tuple[Workload, ...]  #: By part.


def place_classes(
    problem: Problem, segments: Segments, standing: Sequence[PlacedGpu], limit: Limit
) -> tuple[PlacedGpu, ...] | None:
    """Return a map serving all demands; None without a map, or where neighbours do not act through sums.

    Parameters
    ----------
    problem : Problem
        With a latency budget.
    segments : Segments
        Of the same problem.
    standing : sequence of PlacedGpu
        A map whose devices are candidates as well.
    limit : Limit
    """
    if not tabulate_kinds(problem, segments):
        return None
    return _CuttingStock(problem, segments, limit).place(standing)


@dataclass(slots=True)
class _Master:
    """The program over the patterns added so far."""

    problem: Problem
    classes: Mapping[str, Sequence[Demand]]
    parts: Sequence[DemandPart]
    program: Program = field(default_factory=Program)
    part_rows: dict[DemandPart, int] = field(default_factory=dict)
    class_rows: dict[str, int] = field(default_factory=dict)
    patterns: dict[DevicePattern, int] = field(default_factory=dict)
    _splits: dict[DemandPart, int] = field(default_factory=dict)
    _fleet_rows: dict[int, int] = field(default_factory=dict)
    _met: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.part_rows = {part: self.program.row(low=0.0) for part in self.parts}
        for number, entry in enumerate(self.problem.fleet.entries):
            if entry.count is not None:
                self._fleet_rows[number] = self.program.row(high=float(entry.count))
        for model, demands in self.classes.items():
            self.class_rows[model] = row = self.program.row(low=float(len(demands)), high=float(len(demands)))
            for part in self.parts:
                if part.model == model:
                    takes = {row: 1.0, self.part_rows[part]: -float(part.divisor)}
                    self._splits[part] = self.program.column(0.0, takes)

    def add(self, pattern: DevicePattern) -> bool:
        """Add the column of a pattern; return False when the same parts have a column already."""
        key = pattern.entry, pattern.parts
        if key in self._met or any(part not in self.part_rows for part in pattern.parts):
            return False
        self._met.add(key)
        entries = {self.part_rows[part]: float(count) for part, count in Counter(pattern.parts).items()}
        if pattern.entry in self._fleet_rows:
            entries[self._fleet_rows[pattern.entry]] = 1.0
        price = self.problem.fleet.entries[pattern.entry].price_per_hour
        self.patterns[pattern] = self.program.column(price, entries)
        return True

    def cost(self, number: int, solution: Solution) -> float:
        """Return the least worth of a pattern's parts by the duals: the device's price, and its scarcity."""
        scarcity = solution.duals[self._fleet_rows[number]] if number in self._fleet_rows else 0.0
        return self.problem.fleet.entries[number].price_per_hour - scarcity

    def reduced_cost(self, pattern: DevicePattern, solution: Solution) -> float:
        """Return the cost of a device less the worth of its parts."""
        worth = math.fsum(solution.duals[self.part_rows[part]] for part in pattern.parts)
        return self.cost(pattern.entry, solution) - worth

    def count_splits(self, solution: Solution) -> dict[DemandPart, int]:
        """Return the number of demands each part serves."""
        return {part: round(solution.values[column]) for part, column in self._splits.items()}


@dataclass(slots=True)
class _CuttingStock:
    """Searches maps of a problem."""

    problem: Problem
    segments: Segments
    limit: Limit
    _classes: DemandClasses = field(init=False)
    _pricings: list[TablePricing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._classes = group_alike(self.problem, self.segments)

    def place(self, standing: Sequence[PlacedGpu]) -> tuple[PlacedGpu, ...] | None:
        """Return the cheapest map of the search; None without a map."""
        seconds = self.limit.seconds or math.inf
        least = [min(cpu_s, seconds / 2.0) for cpu_s in _LEAST_S]
        until = self.limit.keeping((self.limit.left_s or 0.0) / 2.0).with_least(least[0])
        master = None
        with self.problem.limits.until(until), suppress(TimeUpError):
            parts = self._choose_parts()
            if parts is None:
                return None
            master = _Master(self.problem, self._classes, parts)
            for pattern in self._list_known(standing):
                master.add(pattern)
            for number, pricing in enumerate(self._pricings):
                for priced in pricing.list_alone():
                    master.add(DevicePattern(number, priced.parts, priced.workloads))
            self._generate(master, until)
        return None if master is None else self._choose_patterns(master, self.limit.with_least(least[1]))

    def _choose_parts(self) -> list[DemandPart] | None:
        """Return the parts demands may be split into; None where some demand has no feasible split."""
        numbers = number_classes(self.problem, self.segments)
        parts = [DemandPart(model, divisor) for model in self._classes for divisor in _DIVISORS]
        costs = np.full(len(parts), np.inf)
        for entry, kind in zip(self.problem.fleet.entries, tabulate_kinds(self.problem, self.segments), strict=True):
            classes = [numbers[part.model] for part in parts]
            pricing = make_table_pricing(self.segments, entry.device, kind, parts, classes)
            units = pricing.least_units()
            costs = np.minimum(costs, np.where(units <= SPACE, units * entry.price_per_hour, np.inf))
            self._pricings.append(pricing)
        chosen: list[DemandPart] = []
        for model, demands in self._classes.items():
            most = demands[0].max_replicas or math.inf
            of_class = {
                part: float(cost) * part.divisor
                for part, cost in zip(parts, costs, strict=True)
                if part.model == model and part.divisor <= most and math.isfinite(cost)
            }
            if not of_class:
                return None
            chosen += [part for part, cost in of_class.items() if cost <= _DEARER * min(of_class.values())]
        return chosen

    def _list_known(self, standing: Sequence[PlacedGpu]) -> Iterator[DevicePattern]:
        """Yield the devices of a map whose replicas serve equal parts of their demands."""
        numbers = {entry.device.name: number for number, entry in enumerate(self.problem.fleet.entries)}
        for gpu in standing:
            pairs = []
            for replica in gpu.replicas():
                model = self.segments.first_alike(replica.model)
                if replica.rate_rps > 0.0:
                    divisor = math.ceil(self.problem.demand(model).rate_rps / replica.rate_rps * (1.0 - 1e-9))
                    workload = Workload(model, replica.batch, replica.share, replica.processes)
                    pairs.append((DemandPart(model, max(1, divisor)), workload))
            if pairs:
                parts, workloads = zip(*sorted(pairs), strict=True)
                yield DevicePattern(numbers[gpu.device], parts, workloads)

    def _generate(self, master: _Master, limit: Limit) -> None:
        """Add patterns that are worth more than their devices, until none is left or the time is up."""
        weights, centre = list(_STABLE), dict[DemandPart, float]()
        for _ in range(_MOST_ROUNDS):
            solution = master.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=self.problem.options.seed)
            if solution is None or limit.is_over:
                return
            duals = {part: solution.duals[row] for part, row in master.part_rows.items()}
            classes = {part: solution.duals[master.class_rows[part.model]] / part.divisor for part in duals}
            mixed = {part: weights[0] * classes[part] + (1.0 - weights[0]) * duals[part] for part in duals}
            halfway = {part: (centre[part] + worth) / 2.0 for part, worth in mixed.items()} if centre else mixed
            added = 0
            for worths in (halfway, mixed):
                added, centre = self._price(master, solution, worths, limit)
                if added:
                    break
            if not added:
                if len(weights) == 1:
                    return
                weights = weights[1:]

    def _price(
        self, master: _Master, solution: Solution, worths: Mapping[DemandPart, float], limit: Limit
    ) -> tuple[int, dict[DemandPart, float]]:
        """Add the most valuable patterns that lower the cost; return their number, and worths bounding all patterns."""
        added, highest = 0, 1.0
        for number, pricing in enumerate(self._pricings):
            cost, new = master.cost(number, solution), 0
            for place, priced in enumerate(pricing.price(worths, cost, limit)):
                if place == 0:
                    highest = max(highest, priced.worth / max(cost, _LITTLE))
                pattern = DevicePattern(number, *_sort_parts(priced.parts, priced.workloads))
                if master.reduced_cost(pattern, solution) < -_LITTLE * cost and master.add(pattern):
                    new += 1
                if new >= _MOST_ADDED:
                    break
            added += new
        return added, {part: worth / highest for part, worth in worths.items()}

    def _choose_patterns(self, master: _Master, least: Limit) -> tuple[PlacedGpu, ...] | None:
        """Return the best map of whole devices over the patterns of least reduced cost."""
        solution = master.program.solve(relaxed=True, seed=self.problem.options.seed)
        if solution is None:
            return None
        ranked = sorted(master.patterns, key=lambda pattern: master.reduced_cost(pattern, solution))
        first = self._solve_whole(master, ranked[: _CHOSEN[0]], _GAP, least)
        second = None if self.limit.is_over else self._solve_whole(master, ranked[: _CHOSEN[1]], EXACT, self.limit)
        maps = [gpus for gpus in (first, second) if gpus is not None]
        return min(maps, key=partial(sum_prices, self.problem), default=None)

    def _solve_whole(
        self, master: _Master, chosen: Sequence[DevicePattern], gap: float, limit: Limit
    ) -> tuple[PlacedGpu, ...] | None:
        """Return the devices with the chosen patterns, without patterns breaking an SLO once evaluated."""
        prices = {entry.price_per_hour for entry in self.problem.fleet.entries}
        step, seed = min(prices) if len(prices) == 1 else 0.0, self.problem.options.seed
        for _ in range(_MOST_REPAIRED):
            whole = _Master(self.problem, self._classes, master.parts)
            for pattern in chosen:
                whole.add(pattern)
            solution = whole.program.solve(time_limit_s=limit.left_s, seed=seed, gap=gap, least_step=step)
            if solution is None:
                return None
            taken = {pattern: round(solution.values[column]) for pattern, column in whole.patterns.items()}
            made = {pattern: self._make_partition(pattern) for pattern, count in taken.items() if count}
            broken = {pattern for pattern, partition in made.items() if not self._holds(pattern, partition)}
            if not broken:
                return tuple(self._name_replicas(made, taken, whole.count_splits(solution)))
            chosen = [pattern for pattern in chosen if pattern not in broken]
        return None

    def _make_partition(self, pattern: DevicePattern) -> PlacedPartition:
        device = self.problem.fleet.entries[pattern.entry].device
        return PlacedPartition(
            tuple(
                PlacedReplica(
                    part.model,
                    workload.batch,
                    workload.processes,
                    workload.share,
                    self.problem.demand(part.model).rate_rps / part.divisor,
                    memory_bytes=self.segments.memory_bytes(self.segments.estimate(device, workload)),
                )
                for part, workload in zip(pattern.parts, pattern.workloads, strict=True)
            )
        )

    def _holds(self, pattern: DevicePattern, partition: PlacedPartition) -> bool:
        device = self.problem.fleet.entries[pattern.entry].device
        memory = sum(replica.memory_bytes or 0 for replica in partition.replicas)
        return memory <= device.dram_bytes and self.segments.holds(device, partition)

    def _name_replicas(
        self,
        made: Mapping[DevicePattern, PlacedPartition],
        taken: Mapping[DevicePattern, int],
        splits: Mapping[DemandPart, int],
    ) -> Iterator[PlacedGpu]:
        """Yield the devices with the names of the demands that their replicas serve, without surplus replicas."""
        left = {model: [demand.model for demand in demands] for model, demands in self._classes.items()}
        names = {
            part: [name for _ in range(count) for name in [left[part.model].pop()] * part.divisor]
            for part, count in splits.items()
        }
        for pattern, partition in made.items():
            device = self.problem.fleet.entries[pattern.entry].device.name
            for _ in range(taken[pattern]):
                pairs = zip(pattern.parts, partition.replicas, strict=True)
                replicas = tuple(_rename(replica, names[part].pop()) for part, replica in pairs if names[part])
                if replicas:
                    yield PlacedGpu(device, (PlacedPartition(replicas),))


def _sort_parts(
    parts: Sequence[DemandPart], workloads: Sequence[Workload]
) -> tuple[tuple[DemandPart, ...], tuple[Workload, ...]]:
    pairs = sorted(zip(parts, workloads, strict=True), key=lambda pair: pair[0])
    return tuple(part for part, _ in pairs), tuple(workload for _, workload in pairs)


def _rename(replica: PlacedReplica, model: str) -> PlacedReplica:
    return PlacedReplica(
        model, replica.batch, replica.processes, replica.share, replica.rate_rps, memory_bytes=replica.memory_bytes
    )
