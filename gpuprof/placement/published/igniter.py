"""iGniter: shares that just keep the SLOs of co-located workloads (Xu et al., TPDS'22, §3.2 and §4)."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MOST_REPLICAS
from gpuprof.placement.evidence import MPS_CLIENTS
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced


@dataclass(frozen=True, slots=True)
class _Task:
    """A workload to be placed: a demand or an equal part of a demand, its batch and its lower bound."""

    demand: Demand
    rate_rps: float
    batch: int
    units: int  # lower bound of the share, in units
    memory_bytes: int


#: Content of a device: (class of the task, present units), sorted. Tasks of a class are interchangeable.
_State = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Igniter:
    """iGniter's interference-aware placement (Algorithms 1 and 2), on the kind of device with the least total cost.

    The estimator's ``beside`` is the interference model; with iGniter's own (equations 1 to 11) the lower bounds are
    those of Theorem 1. Decided here where the paper is silent: the lower bound is searched among the multiples of the
    unit with the estimator instead of by equation 18, which gives the same for its model and works for any other; a
    workload that needs more than a whole device is split into the fewest equal parts that fit (the paper refuses it);
    where equation 17 requires a larger batch than any known, the largest is taken, which only adds slack; models with
    equal files are treated as one model, so that equal devices are tried only once; under latency percentiles instead
    of half the SLO, the batch is the smallest whose share is least; memory is respected.
    """

    unit_pct: float = 2.5  #: Step of a share; the paper's 2.5%.
    #: False gives the paper's FFD+: lower bounds and first fit, without interference. Its maps need not be sound.
    aware: bool = True

    def place(self, problem: Problem) -> Placement:
        """Return the cheapest of the placements on a single kind of device.

        Raises `InputError` when ``unit_pct`` is not a part of 100%.
        """
        if not 0.0 < self.unit_pct <= 100.0:
            raise InputError(f"unit_pct must be above 0 and at most 100 but got {self.unit_pct:g}")
        segments = Segments(problem, capped=False)
        placements = [self._on_kind(problem, segments, entry) for entry in problem.fleet.entries]
        return min(placements, key=lambda placement: _worth(problem, placement))

    def _on_kind(self, problem: Problem, segments: Segments, entry: FleetEntry) -> Placement:
        cluster = _Cluster(segments, entry.device, self.unit_pct, self.aware)
        tasks = [task for demand in problem.by_priority() for task in cluster.tasks(demand)]
        fleet = _Devices(cluster, entry.count)
        for task in sorted(tasks, key=lambda task: (-task.demand.priority, -task.units)):  # line 3
            fleet.add(task)
        return with_unplaced(
            problem, segments, Placement("igniter" if self.aware else "igniter-ffd+", fleet.to_gpus(entry.device.name))
        )


@dataclass(slots=True)
class _Cluster:
    """Computes shares on a kind of device and caches them: many devices are equal."""

    segments: Segments
    device: Device
    unit_pct: float
    aware: bool
    classes: list[_Task] = field(default_factory=list)
    _class_of: dict[tuple[object, ...], int] = field(default_factory=dict)
    _allocated: dict[tuple[_State, int], _State] = field(default_factory=dict)
    _refused: dict[tuple[_State, int], int] = field(default_factory=dict)  #: Insufficient numbers of units.
    _made: dict[tuple[object, ...], _Task | None] = field(default_factory=dict)

    @property
    def most_units(self) -> int:
        """Units of share in the whole device."""
        return int(100.0 / self.unit_pct + 1e-9)

    def number(self, task: _Task) -> int:
        """Return the number of a task's class: tasks of a class are interchangeable."""
        key = (*self._equivalence_key(task.demand), task.rate_rps)
        if key not in self._class_of:
            self._class_of[key] = len(self.classes)
            self.classes.append(task)
        return self._class_of[key]

    def _equivalence_key(self, demand: Demand) -> tuple[object, ...]:
        """Return the properties that two demands must share for their replicas to behave alike."""
        file = self.segments.problem.files.get(demand.model)
        content = self.segments.first_alike(demand.model) if file is None or file.sha256 is None else file.sha256
        return (content, demand.slo)

    def tasks(self, demand: Demand) -> list[_Task]:
        """Return the demand, split into the fewest equal parts that each fit a device; empty when nothing fits."""
        most, fails, works = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS), 0, 1
        while works < most and self._task(demand, demand.rate_rps / works) is None:
            fails, works = works, min(2 * works, most)
        parts = first_of(range(fails + 1, works + 1), lambda n: self._task(demand, demand.rate_rps / n) is not None)
        task = None if parts is None else self._task(demand, demand.rate_rps / parts)
        return [] if task is None or parts is None else [task] * parts

    def _task(self, demand: Demand, rate_rps: float) -> _Task | None:
        key = (*self._equivalence_key(demand), rate_rps)
        if key not in self._made:
            self._made[key] = self._find_lower_bound(demand, rate_rps)
        task = self._made[key]
        return None if task is None else replace(task, demand=demand)

    def _find_lower_bound(self, demand: Demand, rate_rps: float) -> _Task | None:
        """Return the workload with its batch and lower bound (Theorem 1)."""
        best: _Task | None = None
        for batch in self._batches(demand, rate_rps):
            # more units than the best are useless
            fewer_units = range(1, self.most_units + 1 if best is None else best.units)
            units = first_of(fewer_units, partial(self._alone, demand, rate_rps, batch))
            if units is not None:
                estimate = self.segments.estimate(self.device, self._workload(demand.model, batch, units))
                memory = self.segments.memory_bytes(estimate) or 0
                if memory <= self.device.dram_bytes:
                    best = _Task(demand, rate_rps, batch, units, memory)
        return best

    def _batches(self, demand: Demand, rate_rps: float) -> Sequence[int]:
        options = self.segments.problem.options
        if options.latency_budget is not None:
            # The batch that just meets the rate within its whole part of the SLO (equation 17).
            rate, time = rate_rps / 1000.0, options.latency_budget * demand.slo.latency_ms
            sizes = self.segments.search_space.sizes(demand.model, self.device, Share())
            if not sizes:
                return []
            try:
                overlap = self.segments.estimate(self.device, Workload(demand.model, sizes[0], Share())).overlapped_ms
            except InputError:  # no estimate on this kind of device, or a failed run
                return []
            batch = math.ceil(time * rate / (1.0 + rate * overlap / sizes[0]) * (1 - 1e-9))
            return [size for size in sizes if size >= batch][:1] or [sizes[-1]]
        return self.segments.search_space.sizes(demand.model, self.device, Share())

    def _workload(self, model: str, batch: int, units: int) -> Workload:
        return Workload(model, batch, Share(min(100.0, units * self.unit_pct)))

    def _alone(self, demand: Demand, rate_rps: float, batch: int, units: int) -> bool:
        return self.segments.meets(demand, self.device, self._workload(demand.model, batch, units), rate_rps)

    def allocate(self, state: _State, number: int, most: int) -> _State | None:
        """Algorithm 2: raise the shares until every SLO is kept; None when this takes more units than ``most``."""
        key = (state, number)
        if key not in self._allocated and most > self._refused.get(key, -1):
            shares = self._raise_shares(state, number, most)
            if shares is None:
                self._refused[key] = most
            else:
                self._allocated[key] = shares
        allocation = self._allocated.get(key)
        return allocation if allocation is not None and sum(units for _, units in allocation) <= most else None

    def _raise_shares(self, state: _State, number: int, most: int) -> _State | None:
        numbers = [n for n, _ in state] + [number]
        tasks = [self.classes[n] for n in numbers]
        units = [count for _, count in state] + [self.classes[number].units]
        if sum(task.memory_bytes for task in tasks) > self.device.dram_bytes or len(tasks) > MPS_CLIENTS:
            return None
        while sum(units) <= most:
            workloads = [self._workload(t.demand.model, t.batch, n) for t, n in zip(tasks, units, strict=True)]
            broken = [i for i in range(len(tasks)) if self.aware and not self._keeps(tasks[i], workloads, i)]
            if not broken:
                return tuple(sorted(zip(numbers, units, strict=True)))
            for index in broken:
                units[index] += 1
        return None

    def _keeps(self, task: _Task, workloads: Sequence[Workload], index: int) -> bool:
        beside = (*workloads[:index], *workloads[index + 1 :])
        return self.segments.meets(task.demand, self.device, workloads[index], task.rate_rps, beside)

    def replica(self, task: _Task, units: int) -> PlacedReplica:
        """Return the task as a replica with a share of ``units``."""
        share = self._workload(task.demand.model, task.batch, units).share
        return PlacedReplica(
            task.demand.model, task.batch, 1, share, task.rate_rps, memory_bytes=task.memory_bytes or None
        )


@dataclass(slots=True)
class _Devices:
    """The devices in use, with equal devices grouped."""

    cluster: _Cluster
    count: int | None
    _states: list[_State] = field(default_factory=list)
    _tasks: list[dict[int, list[_Task]]] = field(default_factory=list)  # by device and class
    _equal: dict[_State, list[int]] = field(default_factory=dict)  # indices, a heap

    def add(self, task: _Task) -> None:
        """Lines 5 to 17: give the task to the device whose shares have to be raised least, or to a new device."""
        number = self.cluster.number(task)
        best: tuple[int, int, _State] | None = None
        for state, indices in self._equal.items():
            used_units = sum(units for _, units in state)
            if used_units + task.units > self.cluster.most_units:
                continue
            # A larger increase than on another device is useless.
            most = self.cluster.most_units if best is None else min(self.cluster.most_units, used_units + best[0])
            allocation = self.cluster.allocate(state, number, most)
            if allocation is None:
                continue
            growth = sum(units for _, units in allocation) - used_units
            if best is None or (growth, indices[0]) < best[:2]:
                best = (growth, indices[0], allocation)
        if best is not None:
            self._move(best[1], best[2])
        elif self.count is None or len(self._states) < self.count:
            self._states.append(())
            self._tasks.append({})
            self._move(len(self._states) - 1, ((number, task.units),))
        else:
            return
        self._tasks[best[1] if best else -1].setdefault(number, []).append(task)

    def _move(self, index: int, state: _State) -> None:
        old = self._states[index]
        if old:
            self._equal[old].remove(index)
            if not self._equal[old]:
                del self._equal[old]
        self._states[index] = state
        insort(self._equal.setdefault(state, []), index)

    def to_gpus(self, device: str) -> tuple[PlacedGpu, ...]:
        """Return the contents of each device."""
        gpus = []
        for state, tasks in zip(self._states, self._tasks, strict=True):
            waiting = {number: list(members) for number, members in tasks.items()}
            replicas = tuple(self.cluster.replica(waiting[number].pop(0), units) for number, units in state)
            gpus.append(PlacedGpu(device, (PlacedPartition(replicas),)))
        return tuple(gpus)


def first_of(numbers: range, holds: Callable[[int], bool]) -> int | None:
    """Return, by bisection, the first number for which ``holds`` is true; ``holds`` must then be true for all above."""
    low, high = numbers.start, numbers.stop - 1
    if high < low or not holds(high):
        return None
    if holds(low):
        return low
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _worth(problem: Problem, placement: Placement) -> tuple[float, float]:
    missing = sum(shortfall.rate_rps for shortfall in placement.unplaced)
    return round(missing, 6), sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
