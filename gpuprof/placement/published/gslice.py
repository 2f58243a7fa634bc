"""GSLICE+: every workload tunes its share and batch by its observed latency (Dhakal et al., SoCC'20)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.igniter import Igniter, first_of
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

_State = tuple[PlacedReplica, ...]  # of one device


@dataclass(frozen=True, slots=True)
class Gslice:
    """GSLICE with iGniter's co-locations, a baseline of iGniter (TPDS'22 §5.1, §5.3) and ParvaGPU.

    Workloads are co-located as in iGniter's map. Each starts with the smallest share that keeps its SLO without
    neighbours, and always takes the largest batch that keeps it (adaptive batching). Then, up to five times, each
    workload independently raises its share if its latency or throughput with neighbours misses its objective, and
    lowers it if both are better by more than the threshold.

    Decided here, where the descriptions are silent: observations come from the estimator; shares change in proportion
    to the deviation from the objective, in whole units, and grow at most into the free part of the device (GSLICE
    itself assigns more than the whole, iGniter's Table 1); the last state in which every SLO holds is kept; without
    such a state, the workload furthest off gets another device, or is reported as not served.
    """

    threshold: float = 0.1  #: Part of the objective; one tenth in iGniter's figures.
    adjustments: int = 5  #: Number of adjustments; five in iGniter's figures.
    unit_pct: float = 2.5  #: Step of a share.

    def place(self, problem: Problem) -> Placement:
        """Return the placement on the kind of device on which iGniter's costs least.

        Raises `InputError` when ``threshold`` is not below 1, ``adjustments`` is negative or ``unit_pct`` no part of
        100%.
        """
        if not 0.0 < self.threshold < 1.0:
            raise InputError(f"threshold must be above 0 and below 1 but got {self.threshold:g}")
        if self.adjustments < 0:
            raise InputError(f"adjustments must be at least 0 but got {self.adjustments}")
        segments = Segments(problem, capped=False)
        placed: list[PlacedGpu] = []
        evicted_replicas: list[tuple[str, PlacedReplica]] = []
        for gpu in Igniter(unit_pct=self.unit_pct).place(problem).gpus:
            tuning = _ShareTuner(segments, problem.device(gpu.device), self)
            replicas, evicted = tuning.settle(tuple(map(tuning.alone, gpu.replicas())))
            placed.append(PlacedGpu(gpu.device, (PlacedPartition(replicas),)))
            evicted_replicas += [(gpu.device, replica) for replica in evicted]
        for name, replica in evicted_replicas:
            count = problem.entry(name).count
            if count is None or sum(gpu.device == name for gpu in placed) < count:
                placed.append(PlacedGpu(name, (PlacedPartition((replica,)),)))
        return with_unplaced(problem, segments, Placement("gslice", tuple(placed)))


@dataclass(slots=True)
class _ShareTuner:
    segments: Segments
    device: Device
    policy: Gslice
    _batches: dict[tuple[str, Share], tuple[int, ...]] = field(default_factory=dict)

    def alone(self, replica: PlacedReplica) -> PlacedReplica:
        """Return the replica with the least share that keeps its SLO without neighbours."""
        # Here and below, 1e-9: quotients carry rounding errors, and `int` would drop a whole unit.
        most = int(100.0 / self.policy.unit_pct + 1e-9)
        units = first_of(range(1, most + 1), partial(self._suffices_alone, replica))
        return replica if units is None else self._with_largest_batch(self._with_units(replica, units), ())

    def settle(self, state: _State) -> tuple[_State, list[PlacedReplica]]:
        """Return the last state in which all SLOs hold, and the replicas evicted for it."""
        evicted: list[PlacedReplica] = []
        while True:
            current, feasible = state, None
            for _ in range(self.policy.adjustments + 1):
                feasible = current if self._holds(current) else feasible
                successor = self._adjust(current)
                if successor == current:
                    break
                current = successor
            if feasible is not None:
                return feasible, evicted
            worst_index = max(range(len(current)), key=lambda index: self._pressure(current, index))
            evicted.append(self.alone(current[worst_index]))
            state = (*state[:worst_index], *state[worst_index + 1 :])

    def _suffices_alone(self, replica: PlacedReplica, units: int) -> bool:
        shared = self._with_units(replica, units)
        return any(self._meets(replace(shared, batch=batch), ()) for batch in self._sizes(shared))

    def _adjust(self, state: _State) -> _State:
        """Return the state after every workload has adjusted itself to its observations in ``state``."""
        # All adjust at once to observations in ``state``, but free shares come from ``after``: no share is given twice.
        after = list(state)
        for index, replica in enumerate(state):
            pressure = self._pressure(state, index)
            units = round(replica.share.sm_pct / self.policy.unit_pct)
            if pressure > 1.0:
                free = 100.0 - sum(placed.share.sm_pct for placed in after) + replica.share.sm_pct
                free_units = int(free / self.policy.unit_pct + 1e-9)
                target_units = max(units + 1, math.ceil(min(units * pressure, free_units) - 1e-9))
                units = max(units, min(target_units, free_units))
            elif pressure < 1.0 - self.policy.threshold:
                units = max(1, math.floor(units * pressure))
            candidate = self._with_largest_batch(self._with_units(replica, units), self._beside(state, index))
            after[index] = candidate if self._is_known(candidate) else replica
        return tuple(after)

    def _is_known(self, replica: PlacedReplica) -> bool:
        try:
            self.segments.estimate(self.device, replica.workload)
        except InputError:
            return False
        return True

    def _pressure(self, state: _State, index: int) -> float:
        """Return latency or throughput relative to its objective, the worse of both; missed if above 1."""
        replica, beside = state[index], self._beside(state, index)
        demand = self.segments.problem.demand(replica.model)
        allowed_ms = demand.slo.latency_ms * (self.segments.problem.options.latency_budget or 1.0)
        ratio = self.segments.tail_ms(demand, self.device, replica.workload, replica.rate_rps, beside) / allowed_ms
        return max(ratio, replica.rate_rps / self.segments.throughput_rps(self.device, replica.workload, beside))

    def _with_largest_batch(self, replica: PlacedReplica, beside: Sequence[Workload]) -> PlacedReplica:
        """Return the replica with the largest batch keeping its SLO beside the others; unchanged where none does."""
        for batch in reversed(self._sizes(replica)):
            larger = replace(replica, batch=batch)
            if self._meets(larger, beside):
                memory = self.segments.memory_bytes(self.segments.estimate(self.device, larger.workload))
                return replace(larger, memory_bytes=memory)
        return replica

    def _sizes(self, replica: PlacedReplica) -> tuple[int, ...]:
        key = (replica.model, replica.share)
        if key not in self._batches:
            batches = self.segments.search_space.listed_batches(replica.model, self.device, replica.share)
            self._batches[key] = tuple(sorted({*batches, replica.batch}))
        return self._batches[key]

    def _meets(self, replica: PlacedReplica, beside: Sequence[Workload]) -> bool:
        demand = self.segments.problem.demand(replica.model)
        try:
            memory = self.segments.memory_bytes(self.segments.estimate(self.device, replica.workload))
            fits = (memory or 0) <= self.device.dram_bytes
            return fits and self.segments.meets(demand, self.device, replica.workload, replica.rate_rps, beside)
        except InputError:
            return False  # no estimate of this batch under this share

    def _holds(self, state: _State) -> bool:
        if sum(replica.memory_bytes or 0 for replica in state) > self.device.dram_bytes:
            return False
        if sum(replica.share.sm_pct for replica in state) > 100.0 + 1e-9:
            return False
        return all(self._meets(member, self._beside(state, index)) for index, member in enumerate(state))

    def _with_units(self, replica: PlacedReplica, units: int) -> PlacedReplica:
        return replace(replica, share=Share(min(100.0, units * self.policy.unit_pct)))

    @staticmethod
    def _beside(state: _State, index: int) -> tuple[Workload, ...]:
        return tuple(neighbour.workload for position, neighbour in enumerate(state) if position != index)
