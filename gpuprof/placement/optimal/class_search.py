"""Maps for many demands of few classes, by column generation over patterns of replicas with their neighbours.

The relaxation's duals say what a part of a demand is worth. Pricing looks, depth first, for the parts that are worth
most together in one partition, shares and batches by `PartitionPlanner`, which counts interference and memory; what
cannot stand together cannot with more beside it. Where neighbours act through sums, `TablePricing` looks at thousands
of combinations in the same time, and demands are split unequally as well. When no pattern is worth more than its
partition, or the time is up, the program is solved in whole numbers over all patterns that were met. That is a
heuristic: it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, product

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.class_program import ClassProgram, DemandPart, PartPattern
from gpuprof.placement.optimal.demand_classes import DemandClasses, group_alike
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.partition_planner import PartitionPlanner, Task
from gpuprof.placement.optimal.pattern import PartitionKind
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.optimal.table_search import TableSearch
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Splits of a demand are considered that take at most this multiple of the least part of a device.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16)
_DEARER = 1.35
_MOST_ROUNDS = 60
#: Questions to the estimator that are remembered, after which no more patterns are looked for.
_MOST_ASKED = 150_000
#: Combinations with one part that are evaluated and planned in one round of pricing, and patterns that it adds.
_MOST_LOOKED_AT = 2_000
_MOST_PLANNED = 12
_MOST_ADDED = 150
#: How much what a part takes of a device alone counts beside its dual, in turn: duals of few patterns are wild.
_STABLE = (0.8, 0.5, 0.2, 0.0)
#: A relaxation that is not better by this part is no better.
_LITTLE = 1e-3
_EPSILON = 1e-6
#: Part of the time that is left to the program in whole numbers.
_FOR_PROGRAM = 0.3


@dataclass(slots=True)
class ClassSearch:
    """Searches maps of one problem."""

    problem: Problem
    segments: Segments  #: Of the same problem.
    limit: Limit
    planner: PartitionPlanner = field(init=False)
    _classes: DemandClasses = field(init=False)
    _usual: dict[DemandPart, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planner = PartitionPlanner(self.problem, self.segments)
        self._classes = group_alike(self.problem, self.segments)

    def search(self, maps: Sequence[Sequence[PlacedGpu]]) -> tuple[PlacedGpu, ...] | None:
        """Return a map that serves all demands, from the patterns of others and new ones; None where none is found."""
        tables = tabulate_kinds(self.problem, self.segments)
        found = TableSearch(self.problem, self.segments, tables, self.limit).search() if tables else None
        return self._search_partitions(maps) if found is None and not self.limit.is_interrupted else found

    def _search_partitions(self, maps: Sequence[Sequence[PlacedGpu]]) -> tuple[PlacedGpu, ...] | None:
        kinds = [
            (entry.device.name, mig)
            for entry in self.problem.fleet.entries
            for mig in dict.fromkeys((None, *(profile.name for profile in entry.device.mig_profiles)))
        ]
        limit = self.limit.keeping(_FOR_PROGRAM * ((self.limit.seconds or 0.0) - self.limit.spent_s))
        program = None
        with self.problem.limits.until(limit), suppress(TimeUpError):
            splits = [(part,) * part.divisor for part in self._split(kinds)]
            program = ClassProgram(self.problem, self._classes, splits, kinds)
            for gpu in chain.from_iterable(maps):
                for partition in gpu.partitions:
                    self._add_known(program, gpu.device, partition)
            for part, kind in product(program.part_rows, kinds):
                self._add_planned(program, kind, (part,))
            self._generate(program, limit)
        if program is None:
            return None
        prices = {entry.price_per_hour for entry in self.problem.fleet.entries}
        solution = program.program.solve(
            time_limit_s=self.limit.left_s,
            seed=self.problem.options.seed,
            least_step=min(prices) if len(prices) == 1 else 0.0,
        )
        return None if solution is None else program.read_solution(solution)

    def _split(self, kinds: Sequence[PartitionKind]) -> Iterator[DemandPart]:
        """Yield the parts of each class that some partition can serve and that take not much more than the best."""
        for model, demands in self._classes.items():
            allowed = [n for n in _DIVISORS if n <= (demands[0].max_replicas or n)]
            needed = {n: n * self._least_fraction(kinds, DemandPart(model, n)) for n in allowed}
            least = min(needed.values())
            if not math.isfinite(least):
                first = self._first_divisor(kinds, model, demands[0].max_replicas)
                needed, least = ({first: 1.0}, 1.0) if first else ({}, 1.0)
            for divisor, taken in needed.items():
                if taken <= least * _DEARER:
                    self._usual[DemandPart(model, divisor)] = taken / divisor
                    yield DemandPart(model, divisor)

    def _first_divisor(self, kinds: Sequence[PartitionKind], model: str, most: int | None) -> int | None:
        """Return into how few replicas a demand can be split that takes many."""
        divisor = _DIVISORS[-1]
        while divisor <= (most or 4096) and not self.limit.is_over:
            divisor = math.ceil(divisor * 1.2)
            if math.isfinite(self._least_fraction(kinds, DemandPart(model, divisor))):
                return divisor
        return None

    def _least_fraction(self, kinds: Sequence[PartitionKind], part: DemandPart) -> float:
        costs = [math.inf]
        for name, mig in kinds:
            device = self.problem.device(name)
            percent = self.planner.least_pct(device, mig, self._task(part))
            if math.isfinite(percent):
                whole = 1.0 if mig is None else device.mig_profile(mig).sms / device.compute_units
                costs.append(percent / 100.0 * whole * self.problem.entry(name).price_per_hour)
        return min(costs)

    def _task(self, part: DemandPart) -> Task:
        return part.model, self.problem.demand(part.model).rate_rps / part.divisor

    def _add_known(self, program: ClassProgram, device: str, partition: PlacedPartition) -> None:
        """Add a partition of another map, if its replicas serve parts."""
        parts, replicas = [], []
        for replica in partition.replicas:
            model = self.segments.first_alike(replica.model)
            rate = self.problem.demand(model).rate_rps
            part = (
                DemandPart(model, max(1, math.ceil(rate / replica.rate_rps * (1.0 - 1e-9))))
                if replica.rate_rps > 0.0
                else None
            )
            if part not in program.part_rows or part is None:
                return
            parts.append(part)
            replicas.append(replace(replica, model=model, rate_rps=rate / part.divisor))
        partition_with_shares = PlacedPartition(tuple(replicas), partition.mig)
        program.add(PartPattern(ReplicaPattern(device, partition_with_shares), tuple(parts)))

    def _add_planned(self, program: ClassProgram, kind: PartitionKind, parts: tuple[DemandPart, ...]) -> bool:
        planned = self.plan(kind, parts)
        return planned is not None and program.add(planned)

    def plan(
        self, kind: PartitionKind, parts: tuple[DemandPart, ...], standing: PlacedPartition | None = None
    ) -> PartPattern | None:
        """Return a partition with a replica for each part, None where no shares are found that keep all SLOs."""
        by_task = sorted(parts, key=self._task)
        device, tasks = self.problem.device(kind[0]), [self._task(one) for one in by_task]
        planned = self.planner.plan(device, kind[1], tasks, standing)
        return None if planned is None else PartPattern(ReplicaPattern(kind[0], planned), tuple(by_task))

    def is_planned(self, kind: PartitionKind, parts: tuple[DemandPart, ...]) -> bool:
        """Whether it is known already what these parts do together."""
        return self.planner.is_planned(self.problem.device(kind[0]), kind[1], [self._task(one) for one in parts])

    def _generate(self, program: ClassProgram, limit: Limit) -> None:
        """Add patterns that are worth more than their partitions, until there are none or the time is up."""
        # Stabilised column generation: duals are pulled towards what parts usually take, ever less as they settle.
        weights, best = list(_STABLE), math.inf
        for _ in range(_MOST_ROUNDS):
            solution = program.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=self.problem.options.seed)
            if solution is None or limit.is_over or self.planner.asked >= _MOST_ASKED:
                return
            if solution.objective > best * (1.0 - _LITTLE) and len(weights) > 1:
                weights.pop(0)
            best = solution.objective
            worth = {
                part: weights[0] * self._usual[part] + (1.0 - weights[0]) * solution.duals[row]
                for part, row in program.part_rows.items()
            }
            patterns = [
                pattern
                for kind, row in program.kind_rows.items()
                for pattern in self._price(kind, worth, solution.duals[row], limit)
            ]
            if not sum(program.add(pattern) for pattern in patterns):
                if len(weights) == 1:
                    return
                weights.pop(0)

    def _price(
        self, kind: PartitionKind, worth: Mapping[DemandPart, float], cost: float, limit: Limit
    ) -> Iterator[PartPattern]:
        """Yield patterns that are worth more than they cost, the best of those that are looked at."""
        device = self.problem.device(kind[0])
        pricing = _Pricing(self, kind, cost, limit)
        for part, value in worth.items():
            percent = self.planner.least_pct(device, kind[1], self._task(part))
            if value > _EPSILON and percent <= 100.0:
                pricing.items.append((value / percent, value, percent, part))
        pricing.items.sort(key=lambda item: item[0], reverse=True)
        pricing.look_everywhere()
        ranked = sorted(pricing.plans, key=lambda pair: -pair[0])[:_MOST_ADDED]
        yield from (pattern for _, pattern in ranked)


@dataclass(slots=True)
class _Pricing:
    """A depth-first search for the parts that are worth most together in a partition."""

    search: ClassSearch
    kind: PartitionKind
    cost: float
    limit: Limit
    items: list[tuple[float, float, float, DemandPart]] = field(default_factory=list)
    plans: list[tuple[float, PartPattern]] = field(default_factory=list)
    looked_at: int = 0
    planned: int = 0
    _seen: set[tuple[DemandPart, ...]] = field(default_factory=set)

    def look_everywhere(self) -> None:
        """Begin with each part in turn, so that none takes all the effort; what was planned before costs little."""
        for position in range(len(self.items)):
            self.looked_at = self.planned = 0
            self._add(None, 0.0, 100.0, position)

    def _extend(self, standing: PartPattern, value: float, free_pct: float) -> None:
        """Look at what stands there with each part more, those most worth their share first.

        Shares alone are a bound on what can still be added: neighbours only make them larger.
        """
        for position in range(len(self.items)):
            if value + self.items[position][0] * free_pct <= self.cost * (1.0 + _EPSILON) + _EPSILON or self._is_over():
                return  # whatever follows is worth less for its share
            self._add(standing, value, free_pct, position)

    def _is_over(self) -> bool:
        return self.looked_at >= _MOST_LOOKED_AT or self.planned >= _MOST_PLANNED or self.limit.is_over

    def _add(self, standing: PartPattern | None, value: float, free_pct: float, position: int) -> None:
        """Look at what stands there with one part more, and at what that can become."""
        _, worth, percent, part = self.items[position]
        parts = tuple(sorted((part,) if standing is None else (*standing.parts, part)))
        if percent > free_pct + _EPSILON or parts in self._seen:
            return
        self._seen.add(parts)
        self.looked_at += 1
        self.planned += not self.search.is_planned(self.kind, parts)
        pattern = self.search.plan(self.kind, parts, None if standing is None else standing.pattern.partition)
        if pattern is None:
            return
        if value + worth > self.cost * (1.0 + _EPSILON) + _EPSILON:
            self.plans.append((value + worth, pattern))
        taken = math.fsum(one.share.sm_pct for one in pattern.pattern.partition.replicas)
        self._extend(pattern, value + worth, 100.0 - taken)
