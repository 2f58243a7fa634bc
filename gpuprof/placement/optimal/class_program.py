"""The program that serves classes of demands that are alike with patterns of whole replicas.

Columns are, for each class, into which replicas its demands are split; the ways to configure a device; and patterns:
what stands together in one partition, each replica with its share, batch, memory and rate, neighbours regarded. Rows
say that there are as many partitions as patterns, and as many replicas of each part as the demands take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from gpuprof.domain.demand import Demand
from gpuprof.domain.share import Share
from gpuprof.placement.optimal.pattern import DeviceConfiguration, PartitionKind, list_configurations
from gpuprof.placement.optimal.pattern_program import ReplicaPattern, fill_configuration
from gpuprof.placement.placement import PlacedGpu, PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import Program, Solution


@dataclass(frozen=True, slots=True, order=True)
class DemandPart:
    """A replica that serves a part of a demand of a class."""

    model: str  #: The first demand of the class.
    divisor: int = 1  #: Into how many equal pieces the demand is divided.
    pieces: int = 1  #: So many of them are served; in lowest terms.

    @property
    def fraction(self) -> float:
        """What part of the demand is served."""
        return self.pieces / self.divisor


#: Parts of one class that make a whole demand.
Split = tuple[DemandPart, ...]


@dataclass(frozen=True, slots=True)
class PartPattern:
    """A partition and which parts its replicas are, in their order."""

    pattern: ReplicaPattern
    parts: tuple[DemandPart, ...]


@dataclass(slots=True)
class ClassProgram:
    """The program over the patterns that were added so far."""

    problem: Problem
    classes: Mapping[str, Sequence[Demand]]  #: Demands that are alike, by the first of them.
    splits: Sequence[Split]  #: Into which the classes' demands may be split.
    kinds: Sequence[PartitionKind]  #: That patterns may stand in.
    program: Program = field(default_factory=Program)
    kind_rows: dict[PartitionKind, int] = field(default_factory=dict)
    part_rows: dict[DemandPart, int] = field(default_factory=dict)
    class_rows: dict[str, int] = field(default_factory=dict)
    _splits: dict[Split, int] = field(default_factory=dict)
    _configurations: list[tuple[DeviceConfiguration, int]] = field(default_factory=list)
    _patterns: dict[PartPattern, int] = field(default_factory=dict)
    _known: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kind_rows = {kind: self.program.row(low=0.0) for kind in self.kinds}
        parts = dict.fromkeys(chain.from_iterable(self.splits))
        self.part_rows = {part: self.program.row(low=0.0) for part in parts}
        for entry in self.problem.fleet.entries:
            shares = {Share(100.0, mig) for device, mig in self.kinds if device == entry.device.name}
            count = {} if entry.count is None else {self.program.row(high=entry.count): 1.0}
            for configuration in list_configurations(entry.device, shares):
                rows = {self.kind_rows[kind]: float(n) for kind, n in configuration.partitions().items()}
                column = self.program.column(entry.price_per_hour, {**rows, **count})
                self._configurations.append((configuration, column))
        for model, demands in self.classes.items():
            self.class_rows[model] = row = self.program.row(low=len(demands), high=len(demands))
            for split in self.splits:
                if split[0].model == model:
                    takes = {self.part_rows[part]: -float(count) for part, count in Counter(split).items()}
                    self._splits[split] = self.program.column(0.0, {row: 1.0, **takes})

    def add(self, part_pattern: PartPattern) -> bool:
        """Add a column for a pattern; False when one of the same parts is there already."""
        # Patterns cost nothing themselves: of the same partition and parts one does as well as another.
        key = (part_pattern.pattern.kind, tuple(sorted(part_pattern.parts)))
        if key in self._known:
            return False
        self._known.add(key)
        entries = {self.part_rows[part]: float(n) for part, n in Counter(part_pattern.parts).items()}
        entries[self.kind_rows[part_pattern.pattern.kind]] = -1.0
        self._patterns[part_pattern] = self.program.column(0.0, entries)
        return True

    def relax_splits(self) -> None:
        """Let parts of a class serve its demands that add up to as many, whether they make whole ones or not."""
        for part, row in self.part_rows.items():
            self.program.column(0.0, {self.class_rows[part.model]: part.fraction, row: -1.0}, integer=False)

    def patterns(self) -> list[PartPattern]:
        """Return the patterns that were added."""
        return list(self._patterns)

    def find_used(self, solution: Solution) -> list[PartPattern]:
        """Return the patterns that a solution takes."""
        return [one for one, column in self._patterns.items() if round(solution.values[column]) > 0]

    def read_solution(self, solution: Solution) -> tuple[PlacedGpu, ...]:
        """Return the devices of a solution, each replica with the name of a demand of its class."""
        names = self._name_replicas(solution)
        waiting: defaultdict[PartitionKind, list[PlacedPartition]] = defaultdict(list)
        for part_pattern, column in self._patterns.items():
            for _ in range(round(solution.values[column])):
                named = _rename(part_pattern, names)
                if named.replicas:
                    waiting[part_pattern.pattern.kind].append(named)
        gpus = []
        for configuration, column in self._configurations:
            for _ in range(round(solution.values[column])):
                placed = tuple(fill_configuration(configuration, waiting))
                if placed:
                    gpus.append(PlacedGpu(configuration.device, placed))
        return tuple(gpus)

    def _name_replicas(self, solution: Solution) -> dict[DemandPart, Iterator[str]]:
        """Return for each part the names of the demands that its replicas serve, each as often as it is split."""
        remaining = {model: [one.model for one in demands] for model, demands in self.classes.items()}
        names: dict[DemandPart, list[str]] = {part: [] for part in self.part_rows}
        for split, column in self._splits.items():
            for _ in range(round(solution.values[column])):
                name = remaining[split[0].model].pop()
                for part in split:
                    names[part].append(name)
        return {part: iter(own) for part, own in names.items()}


def _rename(part_pattern: PartPattern, names: Mapping[DemandPart, Iterator[str]]) -> PlacedPartition:
    """Return the partition with the next names of its parts; replicas for which there is none are left out."""
    replicas = []
    for part, replica in zip(part_pattern.parts, part_pattern.pattern.partition.replicas, strict=True):
        name = next(names[part], None)  # rows ask for at least as many replicas as there are parts, not for as many
        if name is not None:
            replicas.append(replace(replica, model=name))
    return replace(part_pattern.pattern.partition, replicas=tuple(replicas))
