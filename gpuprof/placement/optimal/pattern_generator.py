"""Generates patterns to choose from: which parts of which demands one partition can serve together.

Interference is counted. Every demand is divided into the same parts whatever its SLO, and a partition is planned for
each combination of parts that finds shares in it (`PartitionPlanner`); what is left of the partition goes to one more
replica, at the largest rate that it can serve there. A looser SLO keeps every combination that was possible and adds
some, so the program over these patterns (`PatternProgram`) then costs no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.partition_planner import PartitionPlanner, Task
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.placement import PlacedPartition
from gpuprof.placement.problem import Problem

#: Parts of a demand that stand together, from coarse to fine; each phase has those of the phases before it too.
PHASES: tuple[tuple[float, ...], ...] = ((1.0,), (0.5,), (1 / 3, 2 / 3), (0.25, 0.75))
#: Into how many equal replicas a part may be divided within one partition.
_DIVIDED = (1, 2, 3, 4, 6, 8)
#: Parts that are combined, beside the one that gets what is left of the partition.
_MOST_TOGETHER = 4
#: Relative steps in which the rest of a demand is searched for, down to a part of it.
_STEP, _STEPS = 0.98, 200
_EPSILON = 1e-9


@dataclass(slots=True)
class PatternGenerator:
    """Plans the partitions of a fleet for parts of demands."""

    problem: Problem
    demands: Sequence[Demand]
    planner: PartitionPlanner  #: Of the same problem.
    most_asked: int  #: Questions after which no more partitions are looked at.
    limit: Limit  #: When to stop whatever was asked.
    _filled: dict[tuple[str, str | None, tuple[Task, ...], str], PlacedPartition | None] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether enough was looked at."""
        return self.planner.asked >= self.most_asked or self.limit.is_over

    def phase(self, number: int) -> Iterator[ReplicaPattern]:
        """Yield the patterns of one phase and of those before it."""
        parts = sorted(set(chain(*PHASES[: number + 1])), reverse=True)
        for entry in self.problem.fleet.entries:
            device = entry.device
            for mig in dict.fromkeys([None, *(profile.name for profile in device.mig_profiles)]):
                bundles = [one for part in parts for d in self.demands for one in self._bundles(device, mig, d, part)]
                for partition in self._extend(device, mig, (), bundles):
                    yield ReplicaPattern(device.name, partition)

    def _bundles(self, device: Device, mig: str | None, demand: Demand, part: float) -> Iterator[tuple[Task, ...]]:
        """Yield a part of a demand as one task, and as the equal tasks that take least of the partition."""

        def divide(count: int) -> tuple[Task, ...]:
            return ((demand.model, demand.rate_rps * part / count),) * count

        def taken_pct(count: int) -> float:
            return count * self.planner.least_pct(device, mig, divide(count)[0])

        yield divide(1)
        best = min(_DIVIDED, key=taken_pct)
        if best > 1 and taken_pct(best) <= 100.0:
            yield divide(best)

    def _extend(
        self,
        device: Device,
        mig: str | None,
        standing: tuple[Task, ...],
        bundles: Sequence[tuple[Task, ...]],
        depth: int = 0,
    ) -> Iterator[PlacedPartition]:
        """Yield what stands in a partition with any of the bundles beside what is there, then with what fills it up."""
        for demand in self.demands:
            filled = self._with_most(device, mig, standing, demand)
            if filled is not None:
                yield filled
        for position, bundle in enumerate(bundles if depth < _MOST_TOGETHER else ()):
            more = (*standing, *bundle)
            if self.is_over or not self._is_asked_for(more, bundle[0][0]):
                continue
            planned = self.planner.plan(device, mig, more)
            if planned is not None:
                yield planned
                yield from self._extend(device, mig, more, bundles[position:], depth + 1)

    def _is_asked_for(self, tasks: Sequence[Task], model: str) -> bool:
        """Whether that much of a model is asked for."""
        return sum(rate for name, rate in tasks if name == model) <= self._rate(model) * (1.0 + _EPSILON)

    def _rate(self, model: str) -> float:
        return self.problem.demand(model).rate_rps

    def _with_most(
        self, device: Device, mig: str | None, standing: tuple[Task, ...], demand: Demand
    ) -> PlacedPartition | None:
        """Return the partition with as much of a demand as goes beside what stands there, None where nothing does."""
        key = (device.name, mig, tuple(sorted(standing)), demand.model)
        if key not in self._filled:
            self._filled[key] = self._fill(device, mig, standing, demand)
        return self._filled[key]

    def _fill(
        self, device: Device, mig: str | None, standing: tuple[Task, ...], demand: Demand
    ) -> PlacedPartition | None:
        missing_rps = demand.rate_rps - sum(rate for name, rate in standing if name == demand.model)
        low, high, largest = 0, _STEPS, None
        while low < high and not self.is_over and missing_rps > demand.rate_rps * _EPSILON:
            middle = (low + high) // 2
            planned = self.planner.plan(device, mig, (*standing, (demand.model, missing_rps * _STEP**middle)))
            if planned is None:
                low = middle + 1
            else:
                high, largest = middle, planned
        return largest
