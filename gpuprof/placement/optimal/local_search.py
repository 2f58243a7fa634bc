"""Local search that makes a map cheaper, with interference counted.

The integer program ignores interference. Local search over whole partitions (`PartitionPlanner`) finds feasible
co-locations: a device is dropped when the partitions of the others can take over all its tasks, with larger shares
where necessary. Under pooled queues every step is judged by the queues of all replicas.

`PartitionPlanner` finds shares and batches under which the replicas of a whole device or a MIG instance keep their
SLOs. As in iGniter's Algorithm 2, shares start at the smallest sufficient share without neighbours and are raised step
by step for replicas breaking an SLO. Unlike there, another batch size may help, any estimator gives the interference,
and instances hold several models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.mig import legal_starts, make_placement
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import fits_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Maximum number of queries of a search: a count, not a time, so that a problem has the same map on every machine.
MOST_ASKED = 20_000
#: Maximum number of halvings of a task that fits nowhere whole.
_MOST_HALVINGS = 4

_Gpus = tuple[PlacedGpu, ...]
#: A model and the rate (requests/s) a single replica is to serve.
Task = tuple[str, float]


@dataclass(slots=True)
class LocalSearch:
    """Improves the maps of a problem."""

    problem: Problem
    planner: PartitionPlanner  #: Of the same problem.
    #: Returns the devices with the rates that they serve, None where these are less than the demands or before.
    judge: Callable[[_Gpus], _Gpus | None]
    limit: Limit  #: When to stop.
    _most: int = field(init=False)

    def __post_init__(self) -> None:
        self._most = self.planner.asked + MOST_ASKED

    @property
    def is_over(self) -> bool:
        """Return whether the time or the number of queries is used up."""
        return self.limit.is_over or self.planner.asked >= self._most

    def improve(self, gpus: _Gpus) -> Iterator[_Gpus]:
        """Yield better and better maps, each serving at least as much as the one before and costing no more."""
        # First improvement: the devices are ranked again after each, since full devices may have been emptied.
        has_improved = True
        while has_improved and not self.is_over:
            has_improved = False
            for cheaper in self._cheaper_maps(gpus):
                accepted = None if cheaper is None else self.judge(cheaper)
                if accepted is not None:
                    gpus, has_improved = accepted, True
                    yield gpus
                    break

    def _cheaper_maps(self, gpus: _Gpus) -> Iterator[_Gpus | None]:
        """Yield the maps with one device fewer, the least filled devices first."""
        order = sorted(range(len(gpus)), key=lambda i: (used_price(self.problem, gpus[i]), i))
        tried = set()
        for index in order:
            if gpus[index] in tried or self.is_over:
                continue
            tried.add(gpus[index])
            other_gpus = (*gpus[:index], *gpus[index + 1 :])
            yield self._move_replicas(other_gpus, gpus[index])

    def _move_replicas(self, gpus: _Gpus, source: PlacedGpu) -> _Gpus | None:
        """Return the devices after taking over all tasks of ``source``; None if they cannot take all."""
        device = self.problem.device(source.device)
        for replica in sorted(source.replicas(), key=lambda replica: -device.fraction(replica.share)):
            candidate, missing_rps = self._take_task(gpus, (replica.model, replica.rate_rps))
            if missing_rps:
                return None
            gpus = candidate
        return gpus

    def _take_task(self, gpus: _Gpus, task: Task) -> tuple[_Gpus, float]:
        """Return the devices with as much of a task as they can serve, and the remaining rate."""
        model, missing_rps = task
        for halvings in range(_MOST_HALVINGS + 1):
            size = task[1] / 2**halvings
            while missing_rps > task[1] * 1e-9 and not self.is_over:
                rate = min(size, missing_rps)
                candidate = self._add_task(gpus, (model, rate))
                if candidate is None:
                    break
                gpus, missing_rps = candidate, missing_rps - rate
        return gpus, missing_rps if missing_rps > task[1] * 1e-9 else 0.0

    def _add_task(self, gpus: _Gpus, task: Task) -> _Gpus | None:
        """Return the devices with a task added where shares grow least."""
        best: tuple[float, int, PlacedGpu] | None = None
        visited: set[PlacedGpu] = set()
        for index, gpu in enumerate(gpus):
            if gpu in visited or self.is_over:
                continue
            visited.add(gpu)
            for candidate in self._host_task(gpu, task):
                growth = used_price(self.problem, candidate) - used_price(self.problem, gpu)
                if best is None or growth < best[0] - 1e-12:
                    best = (growth, index, candidate)
        if best is None:
            return None
        candidate_map = (*gpus[: best[1]], best[2], *gpus[best[1] + 1 :])
        return candidate_map if self._is_allowed(candidate_map, task[0]) else None

    def _host_task(self, gpu: PlacedGpu, task: Task) -> Iterator[PlacedGpu]:
        """Yield the device with the task in each partition that can serve it, and in a new instance."""
        device = self.problem.device(gpu.device)
        for position, partition in enumerate(gpu.partitions):
            for tasks in _join_task(partition, task):
                planned = self.planner.plan(device, partition.mig, tasks)
                if planned is not None:
                    placed = replace(planned, start=partition.start)
                    yield PlacedGpu(gpu.device, (*gpu.partitions[:position], placed, *gpu.partitions[position + 1 :]))
                    break
        fresh = self._in_new_instance(device, gpu, task)
        if fresh is not None:
            yield fresh

    def _in_new_instance(self, device: Device, gpu: PlacedGpu, task: Task) -> PlacedGpu | None:
        """Return the device with the smallest new MIG instance that serves the task alone."""
        if any(partition.mig is None for partition in gpu.partitions):
            return None
        placements = [make_placement(device, str(part.mig), part.start or 0) for part in gpu.partitions]
        for profile in sorted(device.mig_profiles, key=lambda p: p.sms):
            starts = legal_starts(device, profile, placements)
            planned = self.planner.plan(device, profile.name, [task]) if starts else None
            if planned is not None:
                parts = (*gpu.partitions, replace(planned, start=starts[-1]))
                return PlacedGpu(gpu.device, tuple(sorted(parts, key=lambda part: part.start or 0)))
        return None

    def _is_allowed(self, gpus: _Gpus, model: str) -> bool:
        """Return whether the model has at most its maximum number of replicas."""
        most = self.problem.demand(model).max_replicas
        return most is None or sum(replica.model == model for gpu in gpus for replica in gpu.replicas()) <= most


def used_price(problem: Problem, gpu: PlacedGpu) -> float:
    """Return the price per hour of the used part of a device."""
    device = problem.device(gpu.device)
    used_fraction = math.fsum(device.fraction(replica.share) for replica in gpu.replicas())
    return used_fraction * problem.entry(gpu.device).price_per_hour


def _join_task(partition: PlacedPartition, task: Task) -> Iterator[list[Task]]:
    """Yield the tasks of a partition with a task added: to its model's replica there, or as a new replica."""
    tasks = [(replica.model, replica.rate_rps) for replica in partition.replicas]
    index = next((i for i, t in enumerate(tasks) if t[0] == task[0]), None)
    if index is not None:
        yield [*tasks[:index], (task[0], tasks[index][1] + task[1]), *tasks[index + 1 :]]
    yield [*tasks, task]


@dataclass(slots=True)
class PartitionPlanner:
    """Plans the replicas of a partition, and caches the results."""

    problem: Problem
    segments: Segments  #: Segments of the same problem.
    asked: int = 0  #: Number of queries that were not cached: a measure of the work so far.
    _planned: dict[tuple[str, str | None, tuple[Task, ...]], PlacedPartition | None] = field(default_factory=dict)
    _least: dict[tuple[str, str | None, Task], int | None] = field(default_factory=dict)
    _alone: dict[tuple[str, Share, Task], Workload | None] = field(default_factory=dict)
    _steps: dict[tuple[str, str | None, str], tuple[float, ...]] = field(default_factory=dict)

    def plan(
        self, device: Device, mig: str | None, tasks: Sequence[Task], partition: PlacedPartition | None = None
    ) -> PlacedPartition | None:
        """Return the partition with a replica for each task, None where no shares keep all SLOs.

        Replicas of tasks in ``partition``, a plan for some of the tasks, keep at least their shares.
        """
        if math.fsum(self.least_pct(device, mig, task) for task in tasks) > 100.0 + TOLERANCE:
            return None  # neighbours only raise the shares
        key = (device.name, mig, tuple(sorted(tasks)))
        if key not in self._planned:
            self._planned[key] = self._find_plan(device, mig, key[2], partition)
        return self._planned[key]

    def least_pct(self, device: Device, mig: str | None, task: Task) -> float:
        """Return the least percentage of the partition under which a task is served alone, or infinity."""
        index = self._find_least_step(device, mig, task)
        return math.inf if index is None else self.steps(device, mig, task[0])[index]

    def steps(self, device: Device, mig: str | None, model: str) -> tuple[float, ...]:
        """Return the shares in percent of the partition a replica may have, smallest first."""
        key = (device.name, mig, model)
        if key not in self._steps:
            shares = {share.sm_pct for share in self.problem.estimator.shares(model, device) if share.mig == mig}
            between = self.segments.search_space.steps(model, device, mig) if shares else ()
            self._steps[key] = tuple(sorted(shares | set(between)))
        return self._steps[key]

    def _find_plan(
        self, device: Device, mig: str | None, tasks: tuple[Task, ...], partition: PlacedPartition | None
    ) -> PlacedPartition | None:
        steps = [self.steps(device, mig, model) for model, _ in tasks]
        old_replicas = [] if partition is None else list(partition.replicas)
        indices: list[int] = []
        workloads: list[Workload] = []
        for shares, task in zip(steps, tasks, strict=True):
            # A standing replica begins with its share: with more neighbours it needs at least as much.
            old_replica = next((r for r in old_replicas if (r.model, r.rate_rps) == task), None)
            if old_replica is not None:
                old_replicas.remove(old_replica)
                indices.append(shares.index(old_replica.share.sm_pct))
                workloads.append(old_replica.workload)
                continue
            index = self._find_least_step(device, mig, task)
            isolated = None if index is None else self._find_workload(device, Share(shares[index], mig), task)
            if index is None or isolated is None:
                return None
            indices.append(index)
            workloads.append(isolated)
        while math.fsum(workload.share.sm_pct for workload in workloads) <= 100.0 + TOLERANCE:
            broken = [i for i, task in enumerate(tasks) if not self._find_feasible_batch(device, task, workloads, i)]
            if not broken:
                return self._partition(device, mig, tasks, workloads)
            for i in broken:
                if indices[i] + 1 >= len(steps[i]):
                    return None
                indices[i] += 1
                enlarged = self._find_workload(device, Share(steps[i][indices[i]], mig), tasks[i])
                if enlarged is None:
                    return None
                workloads[i] = enlarged
        return None

    def _find_feasible_batch(self, device: Device, task: Task, workloads: list[Workload], index: int) -> bool:
        """Return whether a task is served beside its neighbours; another batch that is necessary is stored in
        ``workloads``.
        """
        beside = (*workloads[:index], *workloads[index + 1 :])
        workload = self._workload(device, workloads[index].share, task, beside, workloads[index])
        if workload is not None:
            workloads[index] = workload
        return workload is not None

    def _partition(
        self, device: Device, mig: str | None, tasks: Sequence[Task], workloads: Sequence[Workload]
    ) -> PlacedPartition | None:
        """Return the partition if memory and MPS clients suffice and all replicas keep their SLOs together."""
        replicas = []
        for (model, rate), workload in zip(tasks, workloads, strict=True):
            memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
            replicas.append(
                PlacedReplica(model, workload.batch, workload.processes, workload.share, rate, memory_bytes=memory)
            )
        partition = PlacedPartition(tuple(replicas), mig)
        # A changed batch changes the neighbours of the others.
        return partition if fits_device(device, partition) and self.segments.holds(device, partition) else None

    def _find_least_step(self, device: Device, mig: str | None, task: Task) -> int | None:
        """Return the index of the least step under which the task is served alone."""
        key = (device.name, mig, task)
        if key not in self._least:
            steps = self.steps(device, mig, task[0])
            index = bisect_left(
                steps, True, key=lambda pct: self._find_workload(device, Share(pct, mig), task) is not None
            )
            self._least[key] = index if index < len(steps) else None
        return self._least[key]

    def _find_workload(self, device: Device, share: Share, task: Task) -> Workload | None:
        """Return a workload under the share that serves the task alone; None without one."""
        key = (device.name, share, task)
        if key not in self._alone:
            self._alone[key] = self._workload(device, share, task, ())
        return self._alone[key]

    def _workload(
        self,
        device: Device,
        share: Share,
        task: Task,
        beside: Sequence[Workload],
        now: Workload | None = None,
    ) -> Workload | None:
        """Return a workload that serves the task beside neighbours: the current batch, else the smallest."""
        demand = self.problem.demand(task[0])

        def does(workload: Workload) -> bool:
            self.asked += 1
            try:
                memory_bytes = self.segments.memory_bytes(self.segments.estimate(device, workload)) or 0
                fits = memory_bytes <= device.memory_bytes(share) and not self.segments.is_claimed(device, workload)
                return fits and self.segments.meets(demand, device, workload, task[1], beside)
            except InputError:
                return False  # no estimate of this batch or number of processes

        if now is not None and does(now):
            return now
        if now is not None and self._is_late(device, now, beside):
            return None
        for processes in self.segments.search_space.processes(share):
            sizes = self.segments.search_space.sizes(task[0], device, share)
            able = self._list_sufficient(
                device, [Workload(task[0], size, share, processes) for size in sizes], task[1], beside
            )
            fitting = next((candidate for candidate in able if does(candidate)), None)
            if fitting is not None:
                return fitting
        return None

    def _is_late(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> bool:
        """Return whether a batch, the smallest that serves its rate alone, exceeds the budget beside neighbours.

        Only with a latency budget: larger batches take longer, and smaller ones serve too little.
        """
        if self.problem.options.latency_budget is None:
            return False
        try:
            estimate = self.segments.estimate(device, workload, beside)
        except InputError:
            return False
        return not self.segments.is_within_budget(self.problem.demand(workload.model), estimate, 0.0)

    def _list_sufficient(
        self, device: Device, workloads: Sequence[Workload], rate_rps: float, beside: Sequence[Workload]
    ) -> Sequence[Workload]:
        """Return the smallest workload whose full batches serve the rate; with queueing also larger ones."""

        def enough(workload: Workload) -> bool:
            self.asked += 1
            return self._throughput_rps(device, workload, beside) >= rate_rps * (1.0 - TOLERANCE)

        first = bisect_left(workloads, True, key=enough)
        indices = {first} if self.problem.options.latency_budget is not None else {first, first + 1, first + 3}
        return [workloads[index] for index in sorted(indices) if index < len(workloads)]

    def _throughput_rps(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> float:
        try:
            return self.segments.throughput_rps(device, workload, beside)
        except InputError:
            return 0.0
