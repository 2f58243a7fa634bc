"""Enumerates all patterns of the partitions of a fleet, where they are few enough.

Where an estimator lists only a few shares and batches (a CPU's cores, measured percentages), every combination of
workloads in a partition is evaluated with the rates beside its neighbours. The program over these patterns
(`PatternProgram`) is then exact, and its bound includes interference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.placement.bin import MPS_CLIENTS
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.knapsack import multisets
from gpuprof.placement.optimal.partition_planner import PartitionPlanner
from gpuprof.placement.optimal.pattern import SPACE, share_units
from gpuprof.placement.optimal.pattern_program import ReplicaPattern
from gpuprof.placement.placement import PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments

#: Maximum number of evaluated combinations, over all partitions; under the queueing model each takes many times as
#: long.
_MOST = (6_000, 1_500)
#: Multiple of this maximum: enumeration is not started where shares alone leave more combinations.
_HOPELESS = 10
_EPSILON = 1e-9

#: Contents of a partition: each segment with its rate beside the others.
_Standing = tuple[Segment, ...]


@dataclass(slots=True)
class PatternEnumeration:
    """Lists the possible contents of the partitions of a problem's fleet.

    A replica that breaks its SLO alone breaks it with neighbours too: neighbours are assumed never to speed each other
    up.
    """

    problem: Problem
    demands: Sequence[Demand]  #: Demands with a segment of their own.
    segments: Segments  #: Segments of the same problem.
    planner: PartitionPlanner
    limit: Limit  #: When to give up.
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = _MOST[self.problem.options.latency_budget is None]

    def list_patterns(self) -> tuple[ReplicaPattern, ...] | None:
        """Return every combination serving something, None where there are too many."""
        patterns: list[ReplicaPattern] = []
        for entry in self.problem.fleet.entries:
            for mig in (None, *(profile.name for profile in entry.device.mig_profiles)):
                of_partition = self._patterns_of(entry.device, mig)
                if of_partition is None:
                    return None
                patterns += of_partition
        return tuple(patterns)

    def _patterns_of(self, device: Device, mig: str | None) -> list[ReplicaPattern] | None:
        feasible = self._feasible_workloads(device, mig)
        if feasible is None:
            return None
        patterns = []
        for standing in self._extend(device, (), feasible):
            replicas = tuple(one.replica(one.capacity_rps) for one in standing)
            patterns.append(ReplicaPattern(device.name, PlacedPartition(replicas, mig)))
        return patterns if self._left > 0 else None

    def _feasible_workloads(self, device: Device, mig: str | None) -> list[Workload] | None:
        """Return the workloads that keep their SLO alone in the partition, None where they leave too many
        combinations.
        """
        tried = [
            (demand, Workload(demand.model, batch, Share(pct, mig), processes))
            for demand in self.demands
            for pct in self.planner.steps(device, mig, demand.model)
            for batch in self.segments.search_space.sizes(demand.model, device, Share(pct, mig))
            for processes in self.segments.search_space.processes(Share(pct, mig))
        ]
        if len(tried) > self._left:
            return None
        able: list[Workload] = []
        # Small shares leave the most combinations, so a few of them show early that there are too many.
        for demand, workload in sorted(tried, key=lambda pair: pair[1].share.sm_pct):
            if self.segments.make(demand, device, workload) is not None:
                able.append(workload)
                if len(able).bit_count() == 1 and self._are_hopeless(able):
                    return None
        kept = set(able)
        return None if self._are_hopeless(able) else [one for _, one in tried if one in kept]

    def _are_hopeless(self, feasible: Sequence[Workload]) -> bool:
        """Return whether shares alone leave far too many combinations."""
        units = [share_units(one.share) for one in feasible]
        return bool(units) and multisets(units, SPACE) > _HOPELESS * self._left

    def _extend(self, device: Device, standing: _Standing, feasible: Sequence[Workload]) -> Iterator[_Standing]:
        for position, workload in enumerate(feasible):
            self._left -= 1
            if self._left <= 0 or self.limit.is_over:
                self._left = 0
                return
            together = self._run_together(device, [*(one.workload for one in standing), workload])
            if together is not None:
                yield together
                # Extended from this position on, so that each combination is met once; an infeasible combination stays
                # infeasible with more workloads.
                yield from self._extend(device, together, feasible[position:])

    def _run_together(self, device: Device, running: Sequence[Workload]) -> _Standing | None:
        """Return the segments of co-located workloads, None where the partition does not hold them or any serves
        nothing.
        """
        clients = sum(one.processes for one in running)
        crowded = clients > MPS_CLIENTS and len(running) > 1
        if crowded or math.fsum(one.share.sm_pct for one in running) > 100.0 + _EPSILON:
            return None
        segments = []
        for position, workload in enumerate(running):
            beside = (*running[:position], *running[position + 1 :])
            segment = self.segments.make(self.problem.demand(workload.model), device, workload, beside)
            if segment is None:
                return None
            segments.append(segment)
        held = sum(one.memory_bytes or 0 for one in segments)
        return tuple(segments) if held <= device.memory_bytes(Share(100.0, running[0].share.mig)) else None
