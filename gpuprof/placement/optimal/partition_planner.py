"""Plans partitions: shares and batches under which co-located replicas keep their SLOs.

A partition is a whole device or a MIG instance. As in iGniter's Algorithm 2, shares start at the smallest sufficient
share without neighbours and are raised step by step for replicas breaking an SLO. Unlike there, another batch size
may help, any estimator gives the interference, and instances hold several models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.placement import TOLERANCE, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: A model and the rate (requests/s) a single replica is to serve.
Task = tuple[str, float]

#: Number of rounds after which shares are raised by two steps at once, after twice as many by four, and so on.
_PATIENCE = 4


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
        key = (device.name, mig, tuple(sorted(tasks)))
        if key not in self._planned:
            self._planned[key] = self._find_plan(device, mig, key[2], partition)
        return self._planned[key]

    def least_pct(self, device: Device, mig: str | None, task: Task) -> float:
        """Return the least percentage of the partition under which a task can be done alone, infinity without any."""
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
        rounds = 0
        while math.fsum(workload.share.sm_pct for workload in workloads) <= 100.0 + TOLERANCE:
            broken = [i for i, task in enumerate(tasks) if not self._find_feasible_batch(device, task, workloads, i)]
            if not broken:
                return self._partition(device, mig, tasks, workloads)
            for i in broken:
                if indices[i] + 1 >= len(steps[i]):
                    return None
                indices[i] = min(indices[i] + 2 ** (rounds // _PATIENCE), len(steps[i]) - 1)
                enlarged = self._find_workload(device, Share(steps[i][indices[i]], mig), tasks[i])
                if enlarged is None:
                    return None
                workloads[i] = enlarged
            rounds += 1
        return None

    def _find_feasible_batch(self, device: Device, task: Task, workloads: list[Workload], index: int) -> bool:
        """Return whether a task is done beside its neighbours, if necessary with another batch, which is stored in
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
        """Return the partition if memory and MPS clients suffice and all replicas keep their SLOs as they now are."""
        replicas = []
        for (model, rate), workload in zip(tasks, workloads, strict=True):
            memory = self.segments.memory_bytes(self.segments.estimate(device, workload))
            replicas.append(
                PlacedReplica(model, workload.batch, workload.processes, workload.share, rate, memory_bytes=memory)
            )
        total_bytes = sum(replica.memory_bytes or 0 for replica in replicas)
        clients = sum(replica.processes for replica in replicas)
        if total_bytes > device.memory_bytes(Share(100.0, mig)) or (clients > MPS_CLIENTS and len(replicas) > 1):
            return None
        partition = PlacedPartition(tuple(replicas), mig)
        # A changed batch changes the neighbours of the others.
        return partition if self.segments.holds(device, partition) else None

    def _find_least_step(self, device: Device, mig: str | None, task: Task) -> int | None:
        """Return the index of the least step under which the task can be done alone."""
        key = (device.name, mig, task)
        if key not in self._least:
            steps = self.steps(device, mig, task[0])
            index = bisect_left(
                steps, True, key=lambda pct: self._find_workload(device, Share(pct, mig), task) is not None
            )
            self._least[key] = index if index < len(steps) else None
        return self._least[key]

    def _find_workload(self, device: Device, share: Share, task: Task) -> Workload | None:
        """Return a workload under the share that does the task alone, None without any."""
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
        """Return a workload doing the task beside neighbours: the present batch, else the smallest able."""
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
        """Return whether a batch, the smallest that serves its rate alone, is late beside neighbours.

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
        """Return the smallest workload whose full batches serve the rate; with queueing also larger ones for bursts."""

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
