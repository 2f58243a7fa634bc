"""Segments with the capacity of a replica in a pool: as many equal replicas as serve the demand together.

`Segments` gives the rate of a replica with a stream of its own. The router sends each request to the first free
replica, so requests of a pool wait less than those of separate streams, and every replica serves more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, QuickQueueModel, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.load_search import find_load
from gpuprof.placement.placement import PlacedGpu
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import SLACK, most_within_rps, parts_in_time
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION
from gpuprof.placement.segment import Segments

#: First guess of a replica's rate in a pool, as a part of its maximum rate.
_LIKELY = 0.85
#: Relative difference by which a replica that does not serve the whole rate serves less.
LESS = 1.0 - 1e-6
#: Largest factor by which the formula misses the load of a single replica, and load of hardly any waiting, where it
#: misses more; only nearer loads are solved.
_SURE, _IDLE = 2.0, 0.25
#: Iterations that adapt the number of replicas and the rate of each to one another.
_ROUNDS = 3


def _count(rate_rps: float, each_rps: float) -> int:
    """Return the number of replicas for a rate a single replica does not serve."""
    return max(2, math.ceil(rate_rps / each_rps * (1.0 - 1e-9)))


@dataclass(slots=True)
class _GroupLimits:
    """The loads that groups of equal replicas sustain: by a formula, for other queueing models by coarse queues."""

    problem: Problem
    _loads: dict[tuple[int, BatchServer, Slo, int], float] = field(default_factory=dict)
    #: Ratios of the load by a coarse queue and by the formula.
    _corrections: dict[tuple[int, BatchServer, Slo], float] = field(default_factory=dict)

    def load(self, server: BatchServer, demand: Demand, count: int) -> float:
        """Return about the largest load under which ``count`` replicas answer a demand in time."""
        queueing, slo = queue_of(self.problem.queueing, demand.model), demand.slo
        if not isinstance(queueing, QuickQueueModel):
            return self._solve(queueing, server, slo, count)
        guess = queueing.guess_load(server, count, slo.latency_ms, slo.percentile)
        return guess * self._corrections.get((id(queueing), server, slo), 1.0)

    def can_bear(self, server: BatchServer, demand: Demand, count: int, load: float) -> bool:
        """Return whether ``count`` replicas answer a demand in time at a load."""
        queueing, slo = queue_of(self.problem.queueing, demand.model), demand.slo
        if load >= 1.0:
            return False
        if isinstance(queueing, QuickQueueModel) or (id(queueing), server, slo, count) in self._loads:
            return load <= self.load(server, demand, count) * (1.0 + RATE_PRECISION)
        return self._tail_ms(queueing, server, slo, count, load) <= slo.latency_ms

    def correct(self, server: BatchServer, demand: Demand, count: int) -> bool:
        """Correct the formula's loads of a replica by a coarse queue; return whether this was still to do."""
        queueing, slo = queue_of(self.problem.queueing, demand.model), demand.slo
        key = (id(queueing), server, slo)
        if key in self._corrections or not isinstance(queueing, QuickQueueModel):
            return False
        guess = queueing.guess_load(server, count, slo.latency_ms, slo.percentile)
        self._corrections[key] = self._solve(queueing, server, slo, count) / guess if guess > 0.0 else 1.0
        return True

    def _solve(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int) -> float:
        key = (id(queueing), server, slo, count)
        if key not in self._loads:
            self._loads[key] = find_load(partial(self._tail_ms, queueing, server, slo, count), slo.latency_ms, _LIKELY)
        return self._loads[key]

    def _tail_ms(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int, load: float) -> float:
        self.problem.limits.check_time()
        arrivals = Arrivals(load * count * server.capacity_rps)
        return queueing.pool(arrivals, (server,) * count, coarse=True).whole.percentile(slo.percentile)


class PooledSegments(Segments):
    """Segments with the rate of a replica among as many equal replicas as serve the demand together.

    A first answer, by a formula: its callers verify the map (`gpuprof.placement.pool`).
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._groups = _GroupLimits(problem)

    def correct(self, model: str, gpus: Sequence[PlacedGpu]) -> bool:
        """Solve the queues of a model's replicas in a map; return whether their capacities were corrected."""
        first, workloads = self.problem.demand(self.first_alike(model)), Counter[tuple[str, Workload]]()
        for gpu in gpus:
            workloads.update(
                (gpu.device, o.workload) for o in gpu.replicas() if self.first_alike(o.model) == first.model
            )
        is_corrected = False
        for (device, workload), count in workloads.items():
            server = self.server(self.problem.device(device), workload)
            is_corrected |= self._groups.correct(server, first, max(2, count))
        if is_corrected:
            self.forget(first.model)
        return is_corrected

    def _ceiling_rps(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        demand = self.problem.demand(workload.model)
        try:
            server = self.server(device, workload, beside)
        except InputError:
            return math.inf
        return most_within_rps(server, demand.slo.latency_ms, demand.slo.percentile)

    def _capacity_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload], least_rps: float
    ) -> float:
        ceiling, rate = self._ceiling_rps(device, workload, beside), demand.rate_rps
        server = self.server(device, workload, beside)
        if ceiling >= rate and self._is_in_time(demand, server, rate):
            return rate
        capacity = server.capacity_rps
        parts = parts_in_time(server, demand.slo.latency_ms)
        if not ceiling or ceiling < least_rps or max(parts) < demand.slo.percentile / 100.0 - SLACK:
            return 0.0  # equal replicas cannot compensate for each other's lateness
        if least_rps and not self._groups.can_bear(server, demand, _count(rate, least_rps), least_rps / capacity):
            return 0.0  # less is not used (see `make`), and more need not be searched
        replica_rps, count = min(least_rps or _LIKELY * ceiling, rate * LESS), 0
        for _ in range(_ROUNDS):
            needed_count = _count(rate, replica_rps)
            if needed_count == count:
                break
            count = needed_count
            replica_rps = min(self._groups.load(server, demand, count) * capacity, rate * LESS)
            if replica_rps <= NEARLY_IDLE * ceiling:
                return 0.0
        return replica_rps

    def _is_in_time(self, demand: Demand, server: BatchServer, rate_rps: float) -> bool:
        count = max(1, math.floor(demand.rate_rps / rate_rps + 1e-9)) if rate_rps > 0.0 else 1
        load = rate_rps / server.capacity_rps
        if count > 1:
            return self._groups.can_bear(server, demand, count, load)
        if isinstance(queue_of(self.problem.queueing, demand.model), QuickQueueModel):
            likely = self._groups.load(server, demand, 1)
            if not likely / _SURE <= load <= likely * _SURE + _IDLE:
                return load < likely
        return super()._is_in_time(demand, server, rate_rps)

    def tail_ms(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> float:
        """Return the time at the demand's percentile; for a replica in a pool, the SLO."""
        if rate_rps < demand.rate_rps * (1.0 - 1e-9):
            return demand.slo.latency_ms
        return super().tail_ms(demand, device, workload, rate_rps, beside)
