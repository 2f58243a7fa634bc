"""Maps under the queueing model in which every device is full of equal replicas of one demand.

The other searches guess the rates of pooled replicas, beside few neighbours, by a formula. Here the queues of the pools
are solved, so that no plan takes more devices than the best of these maps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.sojourn import queue_of
from gpuprof.placement.bin import MOST_REPLICAS, fits_device
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition
from gpuprof.placement.pool import Gpus, Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segment, Segments


@dataclass(frozen=True, slots=True)
class _FullDevices:
    """Devices full of copies of a replica."""

    entry: FleetEntry
    segment: Segment  #: At its approximate rate beside the other copies.
    copies: int  #: On each device.
    number: int

    @property
    def cost(self) -> float:
        """Return the price of the devices per hour."""
        return self.number * self.entry.price_per_hour

    def serve(self, demand: Demand) -> Gpus:
        """Return the devices with a demand's rate divided among them."""
        replica = self.segment.replica(demand.rate_rps / self.number / self.copies)
        partition = PlacedPartition(tuple(replace(replica, model=demand.model) for _ in range(self.copies)))
        return (PlacedGpu(self.entry.device.name, (partition,)),) * self.number


def place_equal(problem: Problem, segments: Segments, most_cost: float) -> Gpus:
    """Return the full devices of all demands below ``most_cost``; empty without such devices of unlimited count.

    ``segments``: of the problem, with the approximate rates of pooled replicas. Raises `TimeUpError` when the time for
    queues is up.
    """
    least_cost = min(entry.price_per_hour for entry in problem.fleet.entries)
    spare_cost = most_cost - len(problem.demands) * least_cost
    cheapest: dict[str, _FullDevices | None] = {}
    gpus: list[PlacedGpu] = []
    for demand in problem.demands:
        first = segments.first_alike(demand.model)
        if first not in cheapest and spare_cost > 0.0:
            cheapest[first] = _find_cheapest(problem, segments, problem.demand(first), least_cost + spare_cost)
        devices = cheapest.get(first)
        if devices is None:
            return ()
        spare_cost -= devices.cost - least_cost
        gpus += devices.serve(demand)
    return tuple(gpus) if spare_cost > 0.0 else ()


def _find_cheapest(problem: Problem, segments: Segments, demand: Demand, most_cost: float) -> _FullDevices | None:
    """Return the cheapest full devices below ``most_cost`` whose pool, solved exactly, serves a demand."""
    queueing, most = queue_of(problem.queueing, demand.model), min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    trials = [(devices.cost, place, devices) for place, devices in enumerate(_list_full(problem, segments, demand))]
    heapq.heapify(trials)
    while trials and trials[0][0] < most_cost:
        _, place, devices = heapq.heappop(trials)
        workload, replicas = devices.segment.workload, devices.copies * devices.number
        server = segments.server(devices.entry.device, workload, (workload,) * (devices.copies - 1))
        if replicas > most:
            continue
        if problem.limits.in_time(queueing, (server,) * replicas, demand.slo, demand.rate_rps):
            return devices
        more = replace(devices, number=devices.number + 1)
        heapq.heappush(trials, (more.cost, place, more))
    return None


def _list_full(problem: Problem, segments: Segments, demand: Demand) -> Iterator[_FullDevices]:
    """Yield the devices full of each replica that may serve a demand, in the number that its approximate rate needs."""
    for entry in problem.fleet.entries:
        for segment, copies in _list_copies(problem, segments, demand, entry.device) if entry.count is None else ():
            number = math.ceil(demand.rate_rps / segment.capacity_rps / copies * (1.0 - TOLERANCE))
            yield _FullDevices(entry, segment, copies, number)


def _list_copies(problem: Problem, segments: Segments, demand: Demand, device: Device) -> Iterator[tuple[Segment, int]]:
    """Yield the replicas that may serve a demand on a device full of their copies, and the number of copies."""
    for share in (share for share in problem.estimator.shares(demand.model, device) if share.mig is None):
        copies = int(100.0 / share.sm_pct * (1.0 + TOLERANCE))
        for workload in segments.workloads(demand.model, device, share):
            segment = segments.make(demand, device, workload, (workload,) * (copies - 1))
            if segment is None or segments.is_claimed(device, workload):
                continue
            if fits_device(device, PlacedPartition((segment.replica(0.0),) * copies)):
                yield segment, copies


def refill(problem: Problem, segments: Segments, gpus: Gpus, demand: Demand) -> Iterator[Gpus]:
    """Yield a map's devices with those that serve a demand alone, or nothing, full of the copies that serve it most.

    Without instances of MIG; by the approximate rate of the pool, for each kind of device of limited count.
    """
    pools = Pools(problem, segments)
    for entry in problem.fleet.entries:
        name, most = entry.device.name, demand.max_replicas or math.inf
        kept = tuple(gpu for gpu in gpus if gpu.device != name or {r.model for r in gpu.replicas()} != {demand.model})
        number = (entry.count or 0) - sum(gpu.device == name for gpu in kept)
        filled = [
            kept + _FullDevices(entry, segment, copies, number).serve(demand)
            for segment, copies in (_list_copies(problem, segments, demand, entry.device) if number > 0 else ())
            if copies * number <= most
        ]
        if filled:
            yield max(filled, key=lambda gpus: pools.served_rps(gpus, is_rough=True)[demand.model])
