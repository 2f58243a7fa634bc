"""Segments: possible replicas of a model under a share, which every policy chooses from and packs.

`Segments` gives the rate of a replica with a stream of its own. The router sends each request to the first free
replica, so requests of a pool wait less than those of separate streams, and every replica serves more
(`PooledSegments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, InterferenceEstimator, Workload
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, is_quick, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.planned_workloads import PlannedWorkloads, planned_ms
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION, SLACK, find_load, most_within_rps, parts_in_time
from gpuprof.placement.search_space import SearchSpace

#: Part of another tail below which a tail is treated as shorter.
SHORTER = 0.98
#: First guess of a replica's rate in a pool, as a part of its maximum rate.
_LIKELY = 0.85
#: Iterations that adapt the number of replicas and the rate of each to one another.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """A possible replica: a share of a device with a batch size and a number of processes.

    ParvaGPU (SC'24) §III calls a MIG instance with processes in it a segment; here a share without MIG is a segment
    too.
    """

    model: str
    device: str
    share: Share  #: Share of all processes together.
    batch: int
    processes: int
    #: The largest rate of Poisson arrivals served within the demand's SLO; with ``capped``, at most the demand's rate.
    capacity_rps: float
    fraction: float  #: Fraction of the device's compute units.
    memory_bytes: int | None  #: Memory of all processes together.
    latency_ms: float  #: Planned mean time of a full batch.

    @property
    def workload(self) -> Workload:
        """The workload under the share."""
        return Workload(self.model, self.batch, self.share, self.processes)

    def replica(self, rate_rps: float) -> PlacedReplica:
        """Return the replica serving ``rate_rps`` in this segment."""
        return PlacedReplica(
            self.model, self.batch, self.processes, self.share, rate_rps, memory_bytes=self.memory_bytes
        )


class Segments(PlannedWorkloads):
    """Finds the segments of demands on devices, and caches them.

    ``capped``: search capacities up to the demand's own rate only, which is quicker and enough for most policies.
    """

    def __init__(self, problem: Problem, *, capped: bool = True) -> None:
        super().__init__(problem)
        self.search_space = SearchSpace(problem)
        self._capped = capped
        self._reasons = problem.answers.of(problem.estimator).reasons
        self._best: dict[tuple[str, str], tuple[Segment, ...]] = {}
        self._best_of: dict[tuple[str, str], dict[Share, Segment | None]] = {}
        self._last_largest: dict[tuple[str, str], tuple[int, int]] = {}

    def device_reason(self, demand: Demand, device: Device, find: Callable[[], str | None]) -> str | None:
        """Return the result of ``find``, the reason why the device cannot serve the demand, cached for all policies."""
        queueing = self.problem.queueing
        key = (demand, device.name, self.problem.options, id(queueing), type(self), self._capped)
        if key not in self._reasons:
            self._reasons[key] = queueing, find()
        return self._reasons[key][1]

    def best(self, demand: Demand, device: Device) -> tuple[Segment, ...]:
        """Return for each share the segment of largest capacity, smallest share first.

        Among equal segments (which serve the whole demand), that with fewest processes is chosen, at the smallest
        batch beyond which the tail does not shorten by another 2%. Shares without a segment within the SLO are absent.
        """
        key = (demand.model, device.name)
        if key not in self._best:
            shares = self.problem.estimator.shares(demand.model, device)
            segments = (self.best_of(demand, device, share) for share in shares)
            self._best[key] = tuple(segment for segment in segments if segment is not None)
        return self._best[key]

    def largest(self, demand: Demand, device: Device, workloads: Iterable[Workload]) -> Segment | None:
        """Return the segment of largest capacity, the first among equals; None when no workload meets the SLO.

        The batch that was best under the last share is evaluated first: its capacity likely excludes most others.
        """
        best: tuple[float, int, Segment] | None = None
        last = self._last_largest.get((demand.model, device.name))
        ceilings = [(self._most_rps(demand, device, item), -position, item) for position, item in enumerate(workloads)]
        ranking = sorted(ceilings, key=lambda item: item[:2], reverse=True)
        for ceiling, position, workload in sorted(ranking, key=lambda item: (item[2].batch, item[2].processes) != last):
            if best is not None and ceiling < best[0]:
                break  # its times allow no more
            segment = self.make(demand, device, workload, least_rps=0.0 if best is None else best[0])
            if segment is not None and (best is None or (segment.capacity_rps, position) > best[:2]):
                best = (segment.capacity_rps, position, segment)
        if best is None:
            return None
        self._last_largest[demand.model, device.name] = best[2].batch, best[2].processes
        return best[2]

    def workloads(self, model: str, device: Device, share: Share) -> Iterator[Workload]:
        """Yield the workloads under ``share`` in the listed batches: fewest processes first, then smallest batch."""
        for processes in self.search_space.processes(share):
            for batch in self.search_space.listed_batches(model, device, share):
                yield Workload(model, batch, share, processes)

    def make(
        self,
        demand: Demand,
        device: Device,
        workload: Workload,
        beside: Sequence[Workload] = (),
        *,
        least_rps: float = 0.0,
        whole: bool = False,
    ) -> Segment | None:
        """Return the segment of ``workload``, None when it fits no memory or meets the SLO at no rate.

        For a segment that cannot serve ``least_rps``, the result may be None or have any smaller capacity. With
        ``whole`` it is None unless the segment serves the whole demand.
        """
        try:
            estimate = self.estimate(device, workload, beside)
            memory = self.memory_bytes(estimate)
            if memory is not None and memory > device.memory_bytes(workload.share):
                return None
            if whole:
                capacity = demand.rate_rps if self._serves_all(demand, device, workload, beside) else 0.0
            else:
                capacity = self._capacity_rps(demand, device, workload, beside, least_rps)
        except InputError:
            return None  # no estimate of this batch, of a smaller batch, or of this number of processes
        if capacity <= 0.0:
            return None
        return Segment(
            model=demand.model,
            device=device.name,
            share=workload.share,
            batch=workload.batch,
            processes=workload.processes,
            capacity_rps=capacity,
            fraction=device.fraction(workload.share),
            memory_bytes=memory,
            latency_ms=planned_ms(estimate.latency_ms, self.problem.options.confidence),
        )

    def best_of(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        """Return the segment of largest capacity under ``share``, None when nothing meets the SLO.

        Once a segment serves the whole demand, larger batches are evaluated only while they shorten its tail. Where
        unlisted batches may run too, the best of all is returned, assuming larger batches take
        longer.
        """
        best_by_share = self._best_of.setdefault((demand.model, device.name), {})
        first = self._first_demand(demand)
        if share not in best_by_share and first is not demand:
            segment = self.best_of(first, device, share)
            best_by_share[share] = None if segment is None else replace(segment, model=demand.model)
        if share not in best_by_share:
            best = self._best_listed(demand, device, share)
            if self.search_space.is_dense(demand.model, device, share):
                best = self._best_between(demand, device, share, best)
            best_by_share[share] = best
        return best_by_share[share]

    def leaner(self, demand: Demand, device: Device, best: Segment) -> Iterator[Segment]:
        """Yield segments under the share of ``best`` in listed batches with less memory, least memory first.

        Each serves more than all with less memory.
        """
        able: list[tuple[int, Workload]] = []
        for workload in self.workloads(demand.model, device, best.share):
            with suppress(InputError):
                memory = self.memory_bytes(self.estimate(device, workload))
                if memory is not None and memory < (best.memory_bytes or 0):
                    able.append((memory, workload))
        most = 0.0
        for _, workload in sorted(able):
            segment = self.make(demand, device, workload, least_rps=most)
            if segment is not None and most < segment.capacity_rps:
                most = segment.capacity_rps
                yield segment
                if most >= best.capacity_rps:
                    return

    def _best_between(self, demand: Demand, device: Device, share: Share, best: Segment | None) -> Segment | None:
        """Return the best segment of any batch, given the best of the listed batches."""
        batches = self.search_space.listed_batches(demand.model, device, share)
        for processes in self.search_space.processes(share):
            gaps = list(zip((0, *batches), batches, strict=False))
            while gaps:
                low, high = gaps.pop()
                if high - low < 2:
                    continue
                most_rps = 0.0 if best is None else best.capacity_rps
                reach_rps = self.most_between_rps(demand, device, Workload(demand.model, low, share, processes), high)
                if (min(reach_rps, demand.rate_rps) if self._capped else reach_rps) <= most_rps:
                    continue
                middle = (low + high) // 2
                workload = Workload(demand.model, middle, share, processes)
                if self._ceiling_rps(demand, device, workload) > most_rps:
                    segment = self.make(demand, device, workload)
                    best = segment if segment is not None and segment.capacity_rps > most_rps else best
                gaps += [(low, middle), (middle, high)]
        return best

    def most_between_rps(self, demand: Demand, device: Device, workload: Workload, high: int) -> float:
        """Return an upper bound of the rate within the latency budget, from ``workload``'s batch to below ``high``.

        Assumes that no larger batch is quicker, and that none has an estimate where ``workload`` has none. There is no
        bound from batch 0.
        """
        if not workload.batch:
            return math.inf
        return self._ceiling_rps(demand, device, workload) * (high - 1) / workload.batch

    def _best_listed(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        if self.problem.options.latency_budget is not None:
            batches = self.search_space.listed_batches(demand.model, device, share)
            for processes in self.search_space.processes(share):
                self.load_full_rps(device, Workload(demand.model, 0, share, processes), batches)
        segment = self.serving_all(demand, device, share) if self._capped else None
        return segment or self.largest(demand, device, self.workloads(demand.model, device, share))

    def can_serve_all(self, demand: Demand, device: Device, share: Share) -> bool:
        """Return whether some batch under ``share`` serves the whole demand; the likely largest goes first."""
        workloads = self.workloads(demand.model, device, share)
        return any(
            self._most_rps(demand, device, workload) >= demand.rate_rps
            and self.make(demand, device, workload, whole=True) is not None
            for workload in sorted(workloads, key=lambda workload: (workload.processes, -workload.batch))
        )

    def serving_all(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        """Return the best segment under ``share`` serving the whole demand, None where no batch does.

        It has the fewest processes, and the smallest batch beyond which the tail does not shorten.
        """
        best: Segment | None = None
        for workload in self.workloads(demand.model, device, share):
            if best is not None and workload.processes > best.processes:
                break
            if self._ceiling_rps(demand, device, workload) < demand.rate_rps:
                continue  # even full batches serve too little
            if best is None and self._most_rps(demand, device, workload) < demand.rate_rps:
                continue
            segment = self.make(demand, device, workload, whole=True)
            if best is None:
                best = segment
            elif segment is None or not self._is_better(demand, segment, best):
                break
            else:
                best = segment
        return best

    def _capacity_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload], least_rps: float
    ) -> float:
        """Return the largest rate within the SLO, at most the demand's; 0 when even a lone request is too slow."""
        ceiling = self._ceiling_rps(demand, device, workload, beside)
        target_rps = min(ceiling, demand.rate_rps) if self._capped else ceiling
        if self.problem.options.latency_budget is not None:
            return target_rps if self.meets(demand, device, workload, 0.0, beside) else 0.0
        server = self.server(device, workload, beside)
        idle = ceiling * NEARLY_IDLE
        if not self._is_in_time(demand, server, min(least_rps, target_rps)):
            return 0.0  # less than ``least_rps`` is not used (see `make`)
        queueing = queue_of(self.problem.queueing, demand.model)
        return self.problem.limits.largest_rps(queueing, (server,), demand.slo, idle, target_rps)

    def _most_rps(self, demand: Demand, device: Device, workload: Workload) -> float:
        """Return an upper bound of a replica's rate within the demand's SLO, by its times alone."""
        ceiling = self._ceiling_rps(demand, device, workload)
        if self.problem.options.latency_budget is not None:
            return ceiling
        queueing = queue_of(self.problem.queueing, demand.model)
        with suppress(InputError):
            return min(ceiling, self.problem.limits.bound_rps(queueing, self.server(device, workload), demand.slo))
        return ceiling

    def _is_better(self, demand: Demand, segment: Segment, best: Segment) -> bool:
        """Return whether a segment serves more than the best so far, or the same with a shorter tail."""
        if segment.capacity_rps != best.capacity_rps:
            return segment.capacity_rps > best.capacity_rps
        return self.segment_tail_ms(demand, segment) < SHORTER * self.segment_tail_ms(demand, best)

    def segment_tail_ms(self, demand: Demand, segment: Segment) -> float:
        """Return the planned time at the demand's percentile, at the segment's full capacity."""
        device = self.problem.device(segment.device)
        return self.tail_ms(demand, device, segment.workload, segment.capacity_rps)


def _count(rate_rps: float, each_rps: float) -> int:
    """Return the number of replicas for a rate that a single replica cannot serve."""
    return max(2, math.ceil(rate_rps / each_rps * (1.0 - 1e-9)))


@dataclass(slots=True)
class _GroupLimits:
    """Loads that groups of equal replicas sustain: by a formula, or by coarse queues for other queueing models."""

    problem: Problem
    _loads: dict[tuple[int, BatchServer, Slo, int], float] = field(default_factory=dict)

    def load(self, server: BatchServer, demand: Demand, count: int) -> float:
        """Return the approximate largest load at which ``count`` replicas answer a demand within its SLO."""
        queueing, slo = queue_of(self.problem.queueing, demand.model), demand.slo
        if not is_quick(queueing):
            return self._solve(queueing, server, slo, count)
        return queueing.guess_load(server, count, slo.latency_ms, slo.percentile)

    def can_bear(self, server: BatchServer, demand: Demand, count: int, load: float) -> bool:
        """Return whether ``count`` replicas answer a demand within its SLO at a load."""
        queueing, slo = queue_of(self.problem.queueing, demand.model), demand.slo
        if load >= 1.0:
            return False
        if is_quick(queueing) or (id(queueing), server, slo, count) in self._loads:
            return load <= self.load(server, demand, count) * (1.0 + RATE_PRECISION)
        return self._tail_ms(queueing, server, slo, count, load) <= slo.latency_ms

    def _solve(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int) -> float:
        key = (id(queueing), server, slo, count)
        if key not in self._loads:
            self._loads[key] = find_load(partial(self._tail_ms, queueing, server, slo, count), slo.latency_ms, _LIKELY)
        return self._loads[key]

    def _tail_ms(self, queueing: QueueModel, server: BatchServer, slo: Slo, count: int, load: float) -> float:
        self.problem.limits.check_time()
        arrivals = Arrivals(load * count * server.capacity_rps)
        return queueing.pool(arrivals, (server,) * count, coarse=True).whole.percentile(slo.percentile)


class SharedSegments(Segments):
    """Segments in parts of partitions, each with the neighbours that slow it least."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        estimator = problem.estimator
        self._least_beside = estimator.least_beside if isinstance(estimator, InterferenceEstimator) else None
        self._beside_any: dict[tuple[str, Workload], Estimate] = {}

    def estimate(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> Estimate:
        """Return the estimate beside neighbours; for a part without any, beside those that slow it least."""
        estimate = super().estimate(device, workload, beside)
        if beside:
            return estimate
        key = (device.name, estimate.workload)
        if key not in self._beside_any:
            latency = self._slow_down(device, estimate.workload, estimate.latency_ms)
            self._beside_any[key] = replace(estimate, latency_ms=latency)
        return self._beside_any[key]

    def _slow_down(self, device: Device, workload: Workload, alone: Figure) -> Figure:
        if self._least_beside is None or workload.share.sm_pct == 100.0:
            return alone
        return self._least_beside(workload.model, device, alone)


class PooledSegments(Segments):
    """Segments with the rate of a replica among as many equal replicas as serve the demand together.

    A first answer, by a formula: its callers verify the map (`gpuprof.placement.pool`).
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._groups = _GroupLimits(problem)

    def _ceiling_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload] = ()
    ) -> float:
        try:
            server = self.server(device, workload, beside)
        except InputError:
            return 0.0
        return most_within_rps(server, demand.slo.latency_ms, demand.slo.percentile)

    def _capacity_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload], least_rps: float
    ) -> float:
        return self.find_rate(demand, self.server(device, workload, beside), least_rps)

    def find_rate(self, demand: Demand, server: BatchServer, least_rps: float = 0.0) -> float:
        """Return the rate of a replica among as many equal replicas as serve the demand together; see `make`."""
        ceiling, rate = most_within_rps(server, demand.slo.latency_ms, demand.slo.percentile), demand.rate_rps
        if ceiling >= rate and self._is_in_time(demand, server, rate):
            return rate
        capacity = server.capacity_rps
        parts = parts_in_time(server, demand.slo.latency_ms)
        if not ceiling or ceiling < least_rps or max(parts) < demand.slo.percentile / 100.0 - SLACK:
            return 0.0  # equal replicas cannot compensate for each other's lateness
        if least_rps and not self._groups.can_bear(server, demand, _count(rate, least_rps), least_rps / capacity):
            return 0.0  # less is not used (see `make`), and more need not be searched
        replica_rps, count = min(least_rps or _LIKELY * ceiling, rate * (1.0 - ROUNDING)), 0
        for _ in range(_ROUNDS):
            needed_count = _count(rate, replica_rps)
            if needed_count == count:
                break
            count = needed_count
            replica_rps = min(self._groups.load(server, demand, count) * capacity, rate * (1.0 - ROUNDING))
            if replica_rps <= NEARLY_IDLE * ceiling:
                return 0.0
        return replica_rps

    def _is_in_time(self, demand: Demand, server: BatchServer, rate_rps: float) -> bool:
        count = max(1, math.floor(demand.rate_rps / rate_rps + 1e-9)) if rate_rps > 0.0 else 1
        load = rate_rps / server.capacity_rps
        if count > 1:
            return self._groups.can_bear(server, demand, count, load)
        return super()._is_in_time(demand, server, rate_rps)

    def tail_ms(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> float:
        """Return the time at the demand's percentile; for a replica in a pool, the SLO."""
        if rate_rps < demand.rate_rps * (1.0 - 1e-9):
            return demand.slo.latency_ms
        return super().tail_ms(demand, device, workload, rate_rps, beside)
