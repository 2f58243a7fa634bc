"""Maps from patterns of replicas with their neighbours, by cutting stock over classes of demands.

Alike demands form a class of any number, and equal replicas serve each demand: its parts. A pattern is the content of a
device, every part with a share and a batch that keep its SLO beside the others (`PartitionPlanner`). The duals of the
relaxation price the parts, patterns that are worth more than their device are filled greedily, and the integer program
chooses among all patterns, those of as few equal devices as serve a few demands together among them. This is a
heuristic and proves nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations

from gpuprof.domain.demand import Demand
from gpuprof.placement.bin import MOST_REPLICAS
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.candidates import Choices
from gpuprof.placement.optimal.judge import find_step, list_prices, round_up_to_step
from gpuprof.placement.optimal.local_search import PartitionPlanner
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution

#: Most demands of which every subset is tried together on equal devices.
_MOST_TOGETHER = 4


@dataclass(frozen=True, slots=True, order=True)
class DemandPart:
    """A replica serving an equal part of a demand of a class."""

    model: str  #: The first demand of the class.
    divisor: int = 1  #: Number of equal replicas serving the demand.


#: Kind of device and the parts on it, sorted.
_PatternKey = tuple[str, tuple[DemandPart, ...]]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The content of a device."""

    kind: str
    parts: tuple[DemandPart, ...]  #: Sorted.
    partition: PlacedPartition  #: Its replicas in the order of the planner.


@dataclass(slots=True)
class CuttingStock:
    """Searches maps of a problem on devices that are shared whole."""

    problem: Problem
    planner: PartitionPlanner
    choices: Choices
    limit: Limit
    _classes: dict[str, list[Demand]] = field(init=False)
    _rates_rps: dict[str, float] = field(default_factory=dict)
    _patterns: dict[_PatternKey, _Pattern] = field(default_factory=dict)

    def __post_init__(self) -> None:
        classes: defaultdict[str, list[Demand]] = defaultdict(list)
        for demand in self.problem.demands:
            classes[self.planner.segments.first_alike(demand.model)].append(demand)
        self._classes = dict(classes)

    def place(self, demands: Sequence[Demand], most_cost: float) -> tuple[PlacedGpu, ...]:
        """Return the cheapest map found; empty where some demand cannot be served whole on a device without MIG.

        Empty also where the patterns found make no map below ``most_cost``, the cost of a known map. ``demands``: those
        of the problem, at any rates.
        """
        self._rates_rps, self._patterns = {demand.model: demand.rate_rps for demand in demands}, {}
        parts = [part for model in self._classes for part in self._list_parts(model)]
        for part in parts:
            for entry in self.problem.fleet.entries:
                self._add(entry.device.name, (part,))
        if {part.model for part in parts} != self._classes.keys():
            return ()
        until = self.limit.keeping((self.limit.left_s or 0.0) / 4.0)
        parts = list(dict.fromkeys((*parts, *self._list_equal(until))))
        for entry in self.problem.fleet.entries:
            device = entry.device
            least = {part: self.planner.least_pct(device, None, (part.model, self._rate_rps(part))) for part in parts}
            shares = {part: percent / 100.0 for part, percent in least.items() if math.isfinite(percent)}
            self._fill_devices(device.name, 0.0, shares, until)
        count, prices = 0, list_prices(self.problem.fleet.entries)
        solution: Solution | None = None
        while len(self._patterns) > count and not until.is_over:
            count = len(self._patterns)
            master = self._make_master(parts)
            solution = master.program.solve(relaxed=True, time_limit_s=until.left_s, seed=self.problem.options.seed)
            if solution is None:
                return ()
            values = {part: solution.duals[row] for part, row in master.parts.items()}
            for entry in self.problem.fleet.entries:
                scarcity = solution.duals[master.kinds[entry.device.name]] if entry.count is not None else 0.0
                self._fill_devices(entry.device.name, entry.price_per_hour - scarcity, values, until)
        # Without further patterns, the relaxation bounds the integer program.
        is_whole = len(self._patterns) == count
        least_cost = round_up_to_step(solution.objective, prices) if solution is not None and is_whole else 0.0
        return self._choose(parts) if least_cost < most_cost * (1.0 - EXACT) else ()

    def _list_parts(self, model: str) -> Iterator[DemandPart]:
        """Yield the divisions of a demand into equal replicas, each cheaper than all divisions into fewer."""
        demand = self.problem.demand(model)
        most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
        costs: dict[int, float] = {}
        for segment in self.choices[model]:
            divisor = math.ceil(self._rates_rps[model] / segment.capacity_rps * (1.0 - 1e-9))
            if segment.share.mig is None and divisor <= most:
                cost = divisor * segment.fraction * self.problem.entry(segment.device).price_per_hour
                costs[divisor] = min(cost, costs.get(divisor, math.inf))
        least = math.inf
        for divisor, cost in sorted(costs.items()):
            if cost < least * (1.0 - EXACT):
                least = cost
                yield DemandPart(model, divisor)

    def _list_equal(self, limit: Limit) -> Iterator[DemandPart]:
        """Yield the parts of a few demands on as few equal devices as serve them together, and add their patterns."""
        names = [self.planner.segments.first_alike(demand.model) for demand in self.problem.demands]
        sizes = range(2, len(names) + 1) if len(names) <= _MOST_TOGETHER else ()
        for models in dict.fromkeys(chain.from_iterable(combinations(names, size) for size in sizes)):
            most = min(self.problem.demand(model).max_replicas or MOST_REPLICAS for model in models)
            for entry in self.problem.fleet.entries:
                serves = partial(self._serve_equally, entry.device.name, models, limit)
                number = 1 + bisect_left(range(1, most + 1), True, key=serves)
                if number <= most and not limit.is_over:
                    parts = [DemandPart(model, number) for model in models]
                    self._add(entry.device.name, parts)
                    yield from parts

    def _serve_equally(self, kind: str, models: Sequence[str], limit: Limit, number: int) -> bool:
        """Return whether so many equal devices serve demands together; True where the time is up."""
        return limit.is_over or self._plan(kind, [DemandPart(model, number) for model in models]) is not None

    def _add(self, kind: str, parts: Sequence[DemandPart]) -> None:
        """Plan a device with these parts, and add the pattern if they keep their SLOs together."""
        key = kind, tuple(sorted(parts))
        partition = None if key in self._patterns else self._plan(kind, key[1])
        if partition is not None:
            self._patterns[key] = _Pattern(*key, partition)

    def _plan(
        self, kind: str, parts: Sequence[DemandPart], partition: PlacedPartition | None = None
    ) -> PlacedPartition | None:
        tasks = [(part.model, self._rate_rps(part)) for part in parts]
        return self.planner.plan(self.problem.device(kind), None, tasks, partition)

    def _rate_rps(self, part: DemandPart) -> float:
        return self._rates_rps[part.model] / part.divisor

    def _fill_devices(self, kind: str, price: float, values: Mapping[DemandPart, float], limit: Limit) -> None:
        """Add patterns worth more than their device: each starts with one part and is filled by worth per share."""
        device = self.problem.device(kind)
        least = {
            part: self.planner.least_pct(device, None, (part.model, self._rate_rps(part)))
            for part, value in values.items()
            if value > 0.0
        }
        order = sorted((part for part in least if least[part] <= 100.0), key=lambda p: -values[p] / least[p])
        for first in order:
            content, partition = [first], self._plan(kind, (first,))
            for part in order:
                # Beside more neighbours, no replica does with a smaller share than before.
                while partition is not None and partition.taken_pct + least[part] <= 100.0 and not limit.is_over:
                    extended = self._plan(kind, (*content, part), partition)
                    if extended is None:
                        break
                    content.append(part)
                    partition = extended
            if math.fsum(values[part] for part in content) > price * (1.0 + EXACT):
                self._add(kind, tuple(content))

    def _choose(self, parts: Sequence[DemandPart]) -> tuple[PlacedGpu, ...]:
        """Return the cheapest map of whole devices from the patterns generated so far."""
        master = self._make_master(parts)
        solution = master.program.solve(
            time_limit_s=self.limit.left_s,
            seed=self.problem.options.seed,
            least_step=find_step(list_prices(self.problem.fleet.entries)),
        )
        return () if solution is None else tuple(self._name_replicas(master, solution))

    def _make_master(self, parts: Sequence[DemandPart]) -> _Master:
        master = _Master()
        master.parts = {part: master.program.row(low=0.0) for part in parts}
        for entry in self.problem.fleet.entries:
            if entry.count is not None:
                master.kinds[entry.device.name] = master.program.row(high=float(entry.count))
        classes = {model: master.program.row(len(group), len(group)) for model, group in self._classes.items()}
        for part in parts:
            entries = {classes[part.model]: 1.0, master.parts[part]: -float(part.divisor)}
            master.splits[part] = master.program.column(0.0, entries)
        for key, pattern in self._patterns.items():
            entries = {master.parts[part]: float(count) for part, count in Counter(pattern.parts).items()}
            if pattern.kind in master.kinds:
                entries[master.kinds[pattern.kind]] = 1.0
            price = self.problem.entry(pattern.kind).price_per_hour
            master.patterns[key] = master.program.column(price, entries)
        return master

    def _name_replicas(self, master: _Master, solution: Solution) -> Iterator[PlacedGpu]:
        """Yield the devices with the names of the demands that their replicas serve, without surplus replicas."""
        unnamed = {model: [demand.model for demand in group] for model, group in self._classes.items()}
        names: dict[tuple[str, float], list[str]] = {}
        for part, column in master.splits.items():
            queue = [unnamed[part.model].pop() for _ in range(round(solution.values[column]))]
            names[part.model, self._rate_rps(part)] = [name for name in queue for _ in range(part.divisor)]
        for key, column in master.patterns.items():
            pattern = self._patterns[key]
            for _ in range(round(solution.values[column])):
                waiting = ((replica, names[replica.model, replica.rate_rps]) for replica in pattern.partition.replicas)
                replicas = tuple(replace(replica, model=left.pop()) for replica, left in waiting if left)
                if replicas:
                    yield PlacedGpu(pattern.kind, (PlacedPartition(replicas),))


@dataclass(slots=True)
class _Master:
    """The restricted master program over the patterns generated so far."""

    program: Program = field(default_factory=Program)
    parts: dict[DemandPart, int] = field(default_factory=dict)  #: Rows.
    kinds: dict[str, int] = field(default_factory=dict)  #: Rows of the fleet's counts.
    splits: dict[DemandPart, int] = field(default_factory=dict)  #: Columns.
    patterns: dict[_PatternKey, int] = field(default_factory=dict)  #: Columns.
