"""Segments with the capacity of a replica in a pool: as many equal replicas as serve the demand together.

`Segments` gives the rate of a replica with a stream of its own. The router sends each request to the first free
replica, so requests of a pool wait less than those of separate streams, and every replica serves more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, grid_to_load, load_to_grid
from gpuprof.errors import InputError
from gpuprof.placement.load_search import find_load
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import SLACK, most_within_rps, parts_in_time
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION
from gpuprof.placement.segment import Segments

#: First guess of a replica's rate in a pool, as a part of its maximum rate.
_LIKELY = 0.85
#: Relative difference by which a replica that does not serve the whole rate serves less.
LESS = 1.0 - 1e-6
#: Iterations that adapt the number of replicas and the rate of each to one another.
_ROUNDS = 3


def _count(rate_rps: float, each_rps: float) -> int:
    """Return the number of replicas for a rate a single replica does not serve."""
    return max(2, math.ceil(rate_rps / each_rps * (1.0 - 1e-9)))


@dataclass(slots=True)
class _GroupLimits:
    """The loads that groups of equal replicas sustain by coarse queues, as far as computed."""

    problem: Problem
    _loads: dict[tuple[int, BatchServer, Slo, int], float] = field(default_factory=dict)

    def load(self, server: BatchServer, demand: Demand, count: int, guess: float) -> float:
        """Return the largest load under which ``count`` replicas answer a demand in time."""
        queueing = queue_of(self.problem.queueing, demand.model)
        key = (id(queueing), server, demand.slo, count)
        if key not in self._loads:
            self._loads[key] = self._search(queueing, server, demand.slo, count, guess)
        return self._loads[key]

    def can_bear(self, server: BatchServer, demand: Demand, count: int, load: float) -> bool:
        """Return whether ``count`` replicas answer a demand in time at a load, mostly by the nearest solved queue."""
        if load >= 1.0:
            return False  # for example, full batches that answer less than smaller ones
        queueing = queue_of(self.problem.queueing, demand.model)
        limit = self._loads.get((id(queueing), server, demand.slo, count))
        if limit is not None:
            return load <= limit
        loads = (grid_to_load(math.floor(load_to_grid(load))), load)
        return all(self._tail_ms(queueing, server, demand.slo, count, part) <= demand.slo.latency_ms for part in loads)

    def _search(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int, guess: float) -> float:
        return find_load(partial(self._tail_ms, queueing, server, slo, count), slo.latency_ms, guess)

    def _tail_ms(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int, load: float) -> float:
        self.problem.limits.check_time()
        arrivals = Arrivals(load * count * server.capacity_rps)
        return queueing.pool(arrivals, (server,) * count, coarse=True).whole.percentile(slo.percentile)


class PooledSegments(Segments):
    """Segments with the rate of a replica among as many equal replicas as serve the demand together.

    A first answer, from coarse queues: its callers verify the map (`gpuprof.placement.pool`).
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._groups = _GroupLimits(problem)

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
        if ceiling >= rate and super()._is_in_time(demand, server, rate):
            return rate
        capacity = server.capacity_rps
        parts = parts_in_time(server, demand.slo.latency_ms)
        if not ceiling or ceiling < least_rps or max(parts) < demand.slo.percentile / 100.0 - SLACK:
            return 0.0  # equal replicas cannot compensate for each other's lateness
        replica_rps = min(least_rps or _LIKELY * ceiling, rate * LESS)
        if least_rps and not self._groups.can_bear(server, demand, _count(rate, replica_rps), replica_rps / capacity):
            return 0.0  # less is not used (see `make`), and more need not be searched
        count, best = 0, 0.0
        for _ in range(_ROUNDS):
            needed_count = _count(rate, replica_rps)
            if needed_count == count:
                break
            count = needed_count
            guess = min(replica_rps, _LIKELY * ceiling) / capacity
            load = self._groups.load(server, demand, count, guess)
            replica_rps = min(load * capacity, rate * LESS)
            if replica_rps <= NEARLY_IDLE * ceiling:
                return 0.0
            best = replica_rps
        return best

    def _is_in_time(self, demand: Demand, server: BatchServer, rate_rps: float) -> bool:
        count = max(1, math.floor(demand.rate_rps / rate_rps + 1e-9)) if rate_rps > 0.0 else 1
        if count == 1:
            return super()._is_in_time(demand, server, rate_rps)
        load = rate_rps / server.capacity_rps
        if load >= 1.0:
            return False
        return self._groups.can_bear(server, demand, count, load / (1.0 + RATE_PRECISION))

    def tail_ms(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> float:
        """Return the time at the demand's percentile; for a replica in a pool, the SLO."""
        if rate_rps < demand.rate_rps * (1.0 - 1e-9):
            return demand.slo.latency_ms
        return super().tail_ms(demand, device, workload, rate_rps, beside)
