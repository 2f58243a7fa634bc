"""Upper bounds of what a replica of a demand serves under each share, for lower bounds on the cost of all maps.

A replica serves at most the requests that its batches answer in time, whatever its neighbours and its queue
(`most_within_rps`). Under Poisson arrivals, all replicas of a demand together need a certain capacity, so that few
requests wait too long (`least_rate_within`): where this is more than the rate, a replica is counted by its part of that
capacity. A replica that might serve the whole demand alone by these bounds is counted as if it did, until its queue is
solved (`settle`): only replicas that a bound rests on are worth that.

A replica in a part of a partition either has neighbours, which slow it down at least as much as the estimator's minimum
for any neighbours, or leaves the rest of the partition idle and so takes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import SlowingEstimator, Workload, batch_times
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, QuickQueueModel, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.optimal.candidates import Choices, drop_dominated, list_percents, name_alike
from gpuprof.placement.optimal.waiting_bound import least_rate_within
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.pooled_segment import LESS
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_bound import SLACK, most_in_time_rps, most_within_rps
from gpuprof.placement.segment import Segment, Segments

#: Factor by which a request may exceed its SLO in a bound: pools are judged by simulation.
PATIENT = 1.05

_Place = tuple[str, str, Share]


class _Bounding(Segments):
    """Segments of the times of a replica that has its machine to itself."""

    bounds_any_map = True


@dataclass(slots=True)
class BoundTable:
    """Bounds of the replicas of a problem under the queueing model, on some kinds of devices."""

    problem: Problem
    entries: Sequence[FleetEntry]
    _segments: Segments = field(init=False)
    _bounds: dict[str, dict[_Place, Segment]] = field(default_factory=dict)
    #: Servers that may serve the whole demand alone, by place, until they are settled.
    _unsettled: dict[_Place, list[BatchServer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._segments = _Bounding(self.problem)
        for demand in self.problem.demands:
            if self._segments.first_alike(demand.model) == demand.model:
                self._bounds[demand.model] = {}
                for entry in self.entries:
                    self._add_bounds(demand, entry.device)

    def list_choices(self) -> Choices:
        """Return a segment with the highest capacity and the least memory for each share, by model."""
        bounds = {model: drop_dominated(tuple(places.values())) for model, places in self._bounds.items()}
        return name_alike(self.problem, self._segments, bounds)

    def settle(self, segments_by_model: Mapping[str, Sequence[Segment]]) -> bool:
        """Solve the queues of the used segments that may serve their whole demand; return whether there were any."""
        has_removed = False
        for model, segments in segments_by_model.items():
            first = self._segments.first_alike(model)
            for segment in segments:
                place = first, segment.device, segment.share
                if place in self._unsettled:
                    has_removed = True
                    self._settle_place(self.problem.demand(first), place)
        return has_removed

    def _settle_place(self, demand: Demand, place: _Place) -> None:
        servers = self._unsettled.pop(place)
        if not any(
            self._serves_alone(demand, server) for server in reversed(servers)
        ):  # a larger share is likelier to suffice
            bound = self._bounds[demand.model][place]
            self._bounds[demand.model][place] = replace(bound, capacity_rps=demand.rate_rps * LESS)

    def _serves_alone(self, demand: Demand, server: BatchServer) -> bool:
        if demand.rate_rps >= server.capacity_rps:
            return False
        self.problem.limits.check_time()
        sojourn = queue_of(self.problem.queueing, demand.model).pool(Arrivals(demand.rate_rps), (server,)).whole
        return sojourn.percentile(demand.slo.percentile) <= demand.slo.latency_ms

    def _add_bounds(self, demand: Demand, device: Device) -> None:
        with suppress(InputError):
            for mig, (_, percents) in list_percents(self._segments, demand.model, device).items():
                for percent in percents:
                    self._add_share(demand, device, Share(percent, mig))

    def _add_share(self, demand: Demand, device: Device, share: Share) -> None:
        for server, memory in self._list_servers(demand, device, share):
            full = Share(mig=share.mig)
            self._add(demand, device, full, server, memory)  # alone in its partition
            if share != full:
                self._add(demand, device, share, self._slow_down(demand, device, share, server), memory)

    def _add(self, demand: Demand, device: Device, share: Share, server: BatchServer, memory: int | None) -> None:
        """Raise the bound of a share to that of a server."""
        place, part = (demand.model, device.name, share), self._bound_part(demand, server)
        if part <= 0.0:
            return
        bounds = self._bounds[demand.model]
        fraction = device.fraction(share)
        new = Segment(demand.model, device.name, share, 1, 1, demand.rate_rps * part, fraction, memory, 0.0)
        old = bounds.get(place, new)
        bounds[place] = replace(
            new,
            capacity_rps=max(new.capacity_rps, old.capacity_rps),
            memory_bytes=min(new.memory_bytes or 0, old.memory_bytes or 0),
        )
        if part >= 1.0:
            self._unsettled.setdefault(place, []).append(server)

    def _bound_part(self, demand: Demand, server: BatchServer) -> float:
        """Return the largest part of a demand that a replica serves."""
        least_rps = find_least_rps(self.problem, demand)
        if least_rps > demand.rate_rps:
            return min(1.0, most_in_time_rps(server, demand.slo.latency_ms * PATIENT) / least_rps)
        return min(1.0, most_within_rps(server, demand.slo.latency_ms, demand.slo.percentile) / demand.rate_rps)

    def _list_servers(self, demand: Demand, device: Device, share: Share) -> Iterator[tuple[BatchServer, int | None]]:
        """Yield the undisturbed servers of a share, with the least memory of a replica.

        A server forms smaller batches too, so the largest batch alone bounds predicted times; measured times vary by
        batch.
        """
        for processes in self._segments.search_space.processes(share):
            for batch in reversed(self._segments.search_space.listed_batches(demand.model, device, share)):
                workload = Workload(demand.model, batch, share, processes)
                try:
                    estimate = self._segments.estimate(device, workload)
                    server = self._segments.undisturbed_server(device, workload)
                except InputError:
                    continue
                yield server, self._least_memory(device, workload)
                if not estimate.latency_ms.is_observed:
                    break

    def _least_memory(self, device: Device, workload: Workload) -> int | None:
        batches = self._segments.search_space.listed_batches(workload.model, device, workload.share)
        with suppress(InputError):
            return self._segments.memory_bytes(self._segments.estimate(device, replace(workload, batch=batches[0])))
        return None

    def _slow_down(self, demand: Demand, device: Device, share: Share, server: BatchServer) -> BatchServer:
        """Return a server no slower than beside any neighbours."""
        estimator = self.problem.estimator
        if not isinstance(estimator, SlowingEstimator):
            return server
        sizes = range(1, server.batch + 1)
        times = batch_times(estimator, demand.model, device, sizes, share, server.processes)
        options = self.problem.options
        slow_times = (planned_ms(estimator.slow_beside_any(device, time), options.confidence) for time in times)
        return replace(server, latency_ms=tuple(ms + options.host.handover_ms for ms in slow_times))


def find_least_rps(problem: Problem, demand: Demand) -> float:
    """Return the minimum capacity of all replicas of a demand; 0.0 where arrivals are not Poisson."""
    with suppress(InputError):
        if isinstance(queue_of(problem.queueing, demand.model), QuickQueueModel):
            late_part = 1.0 - demand.slo.percentile / 100.0 + SLACK
            return 1000.0 * least_rate_within(demand.rate_rps / 1000.0, demand.slo.latency_ms * PATIENT, late_part)
    return 0.0
