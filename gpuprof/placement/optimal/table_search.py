"""Maps for many demands of few classes where neighbours act through sums: column generation with `TablePricing`.

First demands may be split into whatever parts, whose fractions add up to as many demands as there are: that relaxation
has a dual for each class alone, which soon settles. Then parts must make whole demands. Patterns of least reduced cost
are chosen from in whole numbers. That is a heuristic: it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import numpy as np

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.class_program import ClassProgram, DemandPart, PartPattern, Split
from gpuprof.placement.optimal.demand_classes import DemandClasses, group_alike, number_classes
from gpuprof.placement.optimal.incumbent import sum_prices
from gpuprof.placement.optimal.neighbour_box import KindTable
from gpuprof.placement.optimal.pattern import SPACE, PartitionKind
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.optimal.table_pricing import PricedParts, TablePricing, make_table_pricing
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Solution
from gpuprof.placement.segment import Segments

#: Pieces that demands are divided into, and parts of unequal sizes that a demand is split into at most: first coarsely,
#: then, with a time limit that leaves some, finely.
_COARSE, _FINE = (12, 4), (36, 2)
#: Numbers of equal replicas beside them.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Parts are left out that take this multiple of the class's least part of a device per request.
_DEARER = 1.35
_MOST_ROUNDS = 60
#: Patterns that a round of pricing adds.
_MOST_ADDED = 150
#: Patterns of which the program in whole numbers has the choice, first few and up to a gap, to have a map in any case.
_CHOSEN, _GAP = (120, 300), 6e-3
#: Parts of the limit that patterns and the first program have as processor time in any case, and seconds at most.
_LEAST_PART, _LEAST_S = 0.35, 2.0
_LEAST_PROGRAM_PART, _LEAST_PROGRAM_S = 0.2, 1.0
#: How much the duals of classes count beside those of parts, in turn: the latter are wild while patterns are few.
_STABLE = (0.7, 0.4, 0.0)
_LITTLE = 1e-6
#: A relaxation that is not better by this part is no better.
_STALLED = 1e-4
#: So often in turn it may be no better before parts are priced no more.
_MOST_STALLED = 6
#: Part of the time that is left to the program in whole numbers.
_FOR_PROGRAM = 0.35
#: Part of the time for patterns that the relaxation by classes leaves to those of whole demands.
_FOR_WHOLE = 0.35
#: Programs in whole numbers are solved again without patterns that break an SLO after all, at most this often.
_MOST_REPAIRED = 5


@dataclass(slots=True)
class TableSearch:
    """Searches maps of one problem."""

    problem: Problem
    segments: Segments  #: Of the same problem.
    kinds: Sequence[KindTable]  #: Of the fleet's entries, in their order.
    limit: Limit
    _classes: DemandClasses = field(init=False)
    _pricings: dict[PartitionKind, TablePricing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._classes = group_alike(self.problem, self.segments)

    def search(self) -> tuple[PlacedGpu, ...] | None:
        """Return a map that serves all demands; None where none is found."""
        seconds = self.limit.seconds or 0.0
        limit = self._keep_for_program().with_least(min(_LEAST_S, _LEAST_PART * seconds))
        best, patterns = self._search(_COARSE, (), limit)
        if best is None or self.limit.seconds is None or self.limit.is_over:
            return best
        finer, _ = self._search(_FINE, patterns, self._keep_for_program())
        return best if finer is None else min(best, finer, key=partial(sum_prices, self.problem))

    def _keep_for_program(self) -> Limit:
        """Return the limit of patterns: some of what is left is for the program in whole numbers."""
        return self.limit.keeping(_FOR_PROGRAM * (self.limit.left_s or 0.0))

    def _search(
        self, pieces: tuple[int, int], known: Sequence[PartPattern], limit: Limit
    ) -> tuple[tuple[PlacedGpu, ...] | None, Sequence[PartPattern]]:
        """Return the best map of demands that are split so, and all patterns that were met."""
        program = None
        with self.problem.limits.until(limit), suppress(TimeUpError):
            splits = self._tabulate_parts(*pieces)
            if splits is None:
                return None, known
            relaxed = self._make_program(splits, known, unequal=True)
            relaxed = self._generate(relaxed, _keep_for_whole(limit), by_class=True)
            program = self._make_program(splits, relaxed.patterns())
            program = self._generate(program, limit, by_class=False)
        if program is None or limit.is_interrupted:
            return None, known
        return self._solve(program, splits or ()), program.patterns()

    def _tabulate_parts(self, pieces: int, most_unequal: int) -> Sequence[Split] | None:
        """Return how demands may be split; None where a class cannot be served in one of these ways."""
        fractions = sorted(
            {Fraction(n, pieces) for n in range(1, pieces + 1)} | {Fraction(1, n) for n in _DIVISORS}, reverse=True
        )
        numbers = number_classes(self.problem, self.segments)
        parts = [DemandPart(model, one.denominator, one.numerator) for model in self._classes for one in fractions]
        costs = np.full(len(parts), np.inf)
        for entry, kind in zip(self.problem.fleet.entries, self.kinds, strict=True):
            classes = [numbers[part.model] for part in parts]
            pricing = make_table_pricing(self.segments, entry.device, kind, parts, classes)
            units = pricing.least_units()
            costs = np.minimum(costs, np.where(units <= SPACE, units * entry.price_per_hour, np.inf))
            self._pricings[entry.device.name, None] = pricing
        splits: list[Split] = []
        for model, demands in self._classes.items():
            kept = _drop_expensive({p: float(c) for p, c in zip(parts, costs, strict=True) if p.model == model})
            most = demands[0].max_replicas or math.inf
            own = {split for split in _list_splits(kept, pieces, most_unequal) if len(split) <= most}
            if not own:
                return None
            splits += sorted(own)
        return splits

    def _make_program(
        self, splits: Sequence[Split], patterns: Sequence[PartPattern], *, unequal: bool = False
    ) -> ClassProgram:
        program = ClassProgram(self.problem, self._classes, splits, tuple(self._pricings))
        if unequal:
            program.relax_splits()
        for pattern in patterns:
            if all(part in program.part_rows for part in pattern.parts):
                program.add(pattern)
        if not patterns or unequal:
            for kind, pricing in self._pricings.items():
                for one in pricing.list_alone():
                    if one.parts[0] in program.part_rows:
                        program.add(self._to_pattern(kind, one))
        return program

    def _generate(self, program: ClassProgram, limit: Limit, *, by_class: bool) -> ClassProgram:
        """Add patterns that are worth more than their partitions, until there are none or the time is up."""
        weights = [1.0] if by_class else list(_STABLE)
        centre: dict[DemandPart, float] = {}
        best, stalled = math.inf, 0
        for _ in range(_MOST_ROUNDS):
            solution = program.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=self.problem.options.seed)
            if solution is None or limit.is_over:
                break
            duals = {part: solution.duals[row] for part, row in program.part_rows.items()}
            classes = {part: solution.duals[program.class_rows[part.model]] * part.fraction for part in duals}
            mixed = {part: weights[0] * classes[part] + (1.0 - weights[0]) * duals[part] for part in duals}
            added = 0
            with suppress(TimeUpError):  # what was added by then stays
                for worth in (_average(centre, mixed), mixed) if centre else (mixed,):
                    added, centre = self._price(program, solution, worth, duals, limit)
                    if added:
                        break
            stalled = stalled + 1 if solution.objective > best * (1.0 - _STALLED) else 0
            if not added or stalled:
                if len(weights) == 1 and (not added or (stalled > _MOST_STALLED and not by_class)):
                    break
                weights = weights[1:] or weights
            best = min(best, solution.objective)
        return program

    def _price(
        self,
        program: ClassProgram,
        solution: Solution,
        worth: Mapping[DemandPart, float],
        duals: Mapping[DemandPart, float],
        limit: Limit,
    ) -> tuple[int, dict[DemandPart, float]]:
        """Add the patterns of most worth that lower the cost; return how many, and worths that none exceeds."""
        added, highest = 0, 1.0
        for kind, row in program.kind_rows.items():
            cost, own = solution.duals[row], 0
            for number, one in enumerate(self._pricings[kind].price(worth, cost, limit)):
                highest = max(highest, one.worth / max(cost, 1e-12)) if number == 0 else highest
                lowers = math.fsum(duals[part] for part in one.parts) > cost * (1.0 + _LITTLE)
                if lowers and program.add(self._to_pattern(kind, one)):
                    own += 1
                if own >= _MOST_ADDED:
                    break
            added += own
        return added, {part: value / highest for part, value in worth.items()}

    def _to_pattern(self, kind: PartitionKind, priced: PricedParts) -> PartPattern:
        pairs = sorted(zip(priced.parts, priced.workloads, strict=True), key=lambda pair: pair[0])
        device = self.problem.device(kind[0])
        replicas = tuple(
            PlacedReplica(
                part.model,
                one.batch,
                one.processes,
                one.share,
                part.fraction * self.problem.demand(part.model).rate_rps,
                memory_bytes=self.segments.memory_bytes(self.segments.estimate(device, one)),
            )
            for part, one in pairs
        )
        return PartPattern(ReplicaPattern(kind[0], PlacedPartition(replicas)), tuple(part for part, _ in pairs))

    def _solve(self, program: ClassProgram, splits: Sequence[Split]) -> tuple[PlacedGpu, ...] | None:
        """Return the best map of whole devices that is found over the patterns of least reduced cost."""
        limit, seed = self.limit, self.problem.options.seed
        solution = program.program.solve(relaxed=True, time_limit_s=limit.left_s, seed=seed)
        if solution is None:
            return None
        patterns = program.patterns()
        reduced = {
            one: solution.duals[program.kind_rows[one.pattern.kind]]
            - math.fsum(solution.duals[program.part_rows[part]] for part in one.parts)
            for one in patterns
        }
        ranked = sorted(patterns, key=lambda one: reduced[one])
        least = limit.with_least(min(_LEAST_PROGRAM_S, _LEAST_PROGRAM_PART * (limit.seconds or 0.0)))
        first = self._solve_whole(splits, self._choose(ranked, 0), _GAP, least)
        second = None if limit.is_over else self._solve_whole(splits, self._choose(ranked, 1), EXACT, limit)
        found = [gpus for gpus in (first, second) if gpus is not None]
        return min(found, key=partial(sum_prices, self.problem), default=None)

    def _choose(self, ranked: Sequence[PartPattern], number: int) -> Sequence[PartPattern]:
        """Return which patterns, of least reduced cost first, the first program in whole numbers or the next has."""
        return ranked[: _CHOSEN[number]]

    def _solve_whole(
        self, splits: Sequence[Split], chosen: Sequence[PartPattern], gap: float, limit: Limit
    ) -> tuple[PlacedGpu, ...] | None:
        """Return the devices that take the chosen patterns, those left out that break an SLO after all."""
        prices = {entry.price_per_hour for entry in self.problem.fleet.entries}
        step, seed = min(prices) if len(prices) == 1 else 0.0, self.problem.options.seed
        for _ in range(_MOST_REPAIRED):
            program = self._make_program(splits, chosen)
            found = program.program.solve(time_limit_s=limit.left_s, seed=seed, gap=gap, least_step=step)
            if found is None:
                return None
            broken = {one for one in program.find_used(found) if not self._holds(one)}
            if not broken:
                return trim_rates(self.problem, program.read_solution(found))
            chosen = [one for one in chosen if one not in broken]
        return None

    def _holds(self, pattern: PartPattern) -> bool:
        device, partition = self.problem.device(pattern.pattern.device), pattern.pattern.partition
        memory = sum(one.memory_bytes or 0 for one in partition.replicas)
        return memory <= device.dram_bytes and self.segments.holds(device, partition)


def _keep_for_whole(limit: Limit) -> Limit:
    """Return the limit of the relaxation by classes: with its patterns alone maps take up to a third more devices."""
    kept = limit.keeping(_FOR_WHOLE * (limit.left_s or 0.0))
    return kept.with_least((1.0 - _FOR_WHOLE) * limit.least_cpu_s)


def _drop_expensive(costs: Mapping[DemandPart, float]) -> list[DemandPart]:
    """Return the parts that cost little for what they serve, or for a demand that is split into equal ones of them."""
    of_rate = {part: cost / part.fraction for part, cost in costs.items()}
    of_demand = {part: cost * _count_equal(part) for part, cost in costs.items()}
    return [
        part
        for part, cost in costs.items()
        if math.isfinite(cost) and any(one[part] <= _DEARER * min(one.values()) for one in (of_rate, of_demand))
    ]


def _count_equal(part: DemandPart) -> int:
    """Return how many of such parts serve a demand."""
    return -(-part.divisor // part.pieces)


def _list_splits(parts: Sequence[DemandPart], pieces: int, most_unequal: int) -> Iterator[Split]:
    """Yield what serves a whole demand: as many of one part as that takes, and pieces of several sizes."""
    for part in parts:
        yield (part,) * _count_equal(part)
    of_size = {pieces * part.pieces // part.divisor: part for part in parts if pieces % part.divisor == 0}
    for sizes in _partitions(pieces, sorted(of_size, reverse=True), most_unequal):
        yield tuple(of_size[size] for size in sizes)


def _partitions(total: int, sizes: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to make a total of at most ``most`` sizes, largest first."""
    if total == 0:
        yield ()
        return
    for position, size in enumerate(sizes):
        if size <= total and most > 0:
            for rest in _partitions(total - size, sizes[position:], most - 1):
                yield (size, *rest)


def _average(first: Mapping[DemandPart, float], second: Mapping[DemandPart, float]) -> dict[DemandPart, float]:
    return {part: (first[part] + second[part]) / 2.0 for part in second}


def trim_rates(problem: Problem, gpus: Sequence[PlacedGpu]) -> tuple[PlacedGpu, ...]:
    """Return the devices with lower rates where the replicas of a demand would serve more than is asked for."""
    served = Placement("optimal", tuple(gpus)).rates_rps()
    kept = {model: min(1.0, problem.demand(model).rate_rps / rate) for model, rate in served.items()}

    def trim(partition: PlacedPartition) -> PlacedPartition:
        replicas = (replace(one, rate_rps=one.rate_rps * kept[one.model]) for one in partition.replicas)
        return replace(partition, replicas=tuple(replicas))

    return tuple(replace(gpu, partitions=tuple(map(trim, gpu.partitions))) for gpu in gpus)
