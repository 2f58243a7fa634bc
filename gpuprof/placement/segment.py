"""What one replica of a model can do under a share: the pieces that every policy chooses from and packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload, batch_times
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.errors import InputError
from gpuprof.placement.alike import find_alike
from gpuprof.placement.menu import Menu
from gpuprof.placement.placement import PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.rate_limit import NEARLY_IDLE
from gpuprof.rules.host_work import disturb_at_worst

#: A tail is shorter when it is below this part of the other.
SHORTER = 0.98


@dataclass(frozen=True, slots=True)
class Segment:
    """A replica that could be: a share of a device with a batch size and a number of processes.

    ParvaGPU (SC'24) §III calls a MIG instance with processes in it a segment; here a share without MIG is one too.

    Attributes
    ----------
    model, device : str
    share : Share
        Of all processes together.
    batch, processes : int
    capacity_rps : float
        The largest rate of Poisson arrivals that it serves within the demand's SLO; where it was looked for with
        ``capped``, no more than the demand asks for.
    fraction : float
        Of the device's compute units.
    memory_bytes : int or None
        Of all processes together.
    latency_ms : float
        Planned mean time of a full batch.
    """

    model: str
    device: str
    share: Share
    batch: int
    processes: int
    capacity_rps: float
    fraction: float
    memory_bytes: int | None
    latency_ms: float

    @property
    def workload(self) -> Workload:
        """What runs under the share."""
        return Workload(self.model, self.batch, self.share, self.processes)

    def replica(self, rate_rps: float) -> PlacedReplica:
        """Return the replica that serves ``rate_rps`` in this segment."""
        return PlacedReplica(
            self.model, self.batch, self.processes, self.share, rate_rps, memory_bytes=self.memory_bytes
        )


def planned_ms(latency: Figure, confidence: float | None) -> float:
    """Return the time to plan with: the upper end of its interval at ``confidence``, for 0 the mean.

    Without a confidence, what was measured or interpolated counts as it is and everything else at its upper end. The
    figure's interval holds 90%; other confidences are read off a normal distribution through it.

    Examples
    --------
    >>> predicted = Figure(10.0, "roofline", low=8.0, high=14.0)
    >>> planned_ms(predicted, None), planned_ms(predicted, 0.0)
    (14.0, 10.0)
    """
    if latency.high is None:
        return latency.value
    if confidence is None:
        return latency.value if latency.is_observed else latency.high
    normal = NormalDist()
    scale = normal.inv_cdf((1.0 + confidence) / 2.0) / normal.inv_cdf(0.95)
    return latency.value + (latency.high - latency.value) * scale


class Segments:
    """Finds the segments of demands on devices; remembers what it computed.

    Requests do not wait for a batch to fill (``max_wait_ms`` 0): a free process takes what is there, so batches
    fill by themselves as the load grows, and waiting could only lengthen the tail without raising the capacity.

    Parameters
    ----------
    problem : Problem
    capped : bool
        Look for capacities up to the demand's own rate only, which is quicker and all that most policies need.
    """

    #: Whether capacities are what no map exceeds, rather than what a replica is known to serve.
    bounds_any_map = False

    def __init__(self, problem: Problem, *, capped: bool = True) -> None:
        self.problem = problem
        self.menu = Menu(problem)
        self._capped = capped
        self._all_rps = math.fsum(demand.rate_rps for demand in problem.demands)
        known = problem.answers.of(problem.estimator)
        self._estimates, self._refusals, self._alone_ms = known.estimates, known.refusals, known.alone_ms
        self._reasons = known.reasons
        self._segments: dict[tuple[str, str], tuple[Segment, ...]] = {}
        self._best: dict[tuple[str, str], tuple[Segment, ...]] = {}
        self._best_of: dict[tuple[str, str], dict[Share, Segment | None]] = {}
        self._servers: dict[tuple[str, Workload], BatchServer] = {}
        self._first_alike = {model: first for model, first in find_alike(problem).items() if model != first}
        self._as_first: dict[Workload, Workload] = {}

    def first_alike(self, model: str) -> str:
        """Return the first demand that is alike, by its model: what holds for it holds for this one."""
        return self._first_alike.get(model, model)

    def _first_workload(self, workload: Workload) -> Workload:
        if workload.model not in self._first_alike:
            return workload
        if workload not in self._as_first:
            self._as_first[workload] = replace(workload, model=self._first_alike[workload.model])
        return self._as_first[workload]

    def _first_demand(self, demand: Demand) -> Demand:
        """Return the first demand that is alike; the demand itself where it is not as the problem has it."""
        first = self._first_alike.get(demand.model)
        return demand if first is None or demand != self.problem.demand(demand.model) else self.problem.demand(first)

    def estimate(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> Estimate:
        """Return the estimator's answer, asked once for each question; of demands that are alike, of the first."""
        if self._first_alike:
            self.problem.limits.check_time()  # of many that are alike a million known answers are asked for
            workload, beside = self._first_workload(workload), [self._first_workload(one) for one in beside]
        # Sorted: neighbours in another order are the same question.
        key = (device.name, workload, tuple(sorted(beside)) if beside else ())
        if key in self._refusals:
            raise self._refusals[key].with_traceback(None)
        if key not in self._estimates:
            self.problem.limits.check_time()
            try:
                self._estimates[key] = self.problem.estimator.estimate(
                    workload.model, device, workload.batch, workload.share, key[2], workload.processes
                )
            except InputError as error:
                self._refusals[key] = error.with_traceback(None)
                raise
        return self._estimates[key]

    def device_reason(self, demand: Demand, device: Device, find: Callable[[], str | None]) -> str | None:
        """Return what ``find`` says of why the device serves none of the demand, asked once for all policies."""
        queueing = self.problem.queueing
        key = (demand, device.name, self.problem.options, id(queueing), type(self), self._capped)
        if key not in self._reasons:
            self._reasons[key] = queueing, find()
        return self._reasons[key][1]

    def latency_ms(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        """Return the planned mean time of one batch."""
        return planned_ms(self.estimate(device, workload, beside).latency_ms, self.problem.options.confidence)

    def throughput_rps(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        """Return the planned requests per second of all processes when every batch is full."""
        return self._throughput_rps(self.estimate(device, workload, beside))

    def _throughput_rps(self, estimate: Estimate) -> float:
        workload = estimate.workload
        time = planned_ms(estimate.latency_ms, self.problem.options.confidence) - estimate.overlapped_ms
        return 1000.0 * workload.batch * workload.processes / time

    def server(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> BatchServer:
        """Return the queueing view of a replica that is disturbed as much as it can be by serving all demands."""
        key = (device.name, workload)
        if beside or key not in self._servers:
            calm = self.undisturbed_server(device, workload, beside)
            server = disturb_at_worst(self.problem.options.host, calm, self._all_rps)
            if beside:
                return server
            self._servers[key] = server
        return self._servers[key]

    def undisturbed_server(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> BatchServer:
        """Return the queueing view of a replica with the machine to itself: times for 1, 2, … ``batch`` requests."""
        estimate = self.estimate(device, workload, beside)
        handover_ms = self.problem.options.host.handover_ms
        return BatchServer(
            latency_ms=tuple(ms + handover_ms for ms in self._latencies_ms(device, workload, beside)),
            batch=workload.batch,
            max_wait_ms=0.0,
            processes=workload.processes,
            latency_cv=estimate.latency_cv,
            pause_factor=estimate.pause_factor,
            pause_cv=estimate.pause_cv,
            overhead_ms=self.problem.options.overhead_ms,
        )

    def _latencies_ms(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> tuple[float, ...]:
        """Return the times of 1, 2, … ``batch`` requests; those without neighbours are kept for larger batches."""
        if beside:
            sizes = (replace(workload, batch=n) for n in range(1, workload.batch + 1))
            return tuple(self.latency_ms(device, size, beside) for size in sizes)
        workload = self._first_workload(workload)
        confidence = self.problem.options.confidence
        kept = self._alone_ms.setdefault((*_series(device, workload), confidence), [])
        missing = range(len(kept) + 1, workload.batch + 1)
        if missing:
            self.problem.limits.check_time()
            named = workload.model, device, missing, workload.share, workload.processes
            kept += [planned_ms(one, confidence) for one in batch_times(self.problem.estimator, *named)]
        return tuple(kept[: workload.batch])

    def meets(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> bool:
        """Whether a replica serves ``rate_rps`` within the demand's SLO, with ``beside`` on the same device."""
        if self.problem.options.latency_budget is not None:
            return self.within_budget(demand, self.estimate(device, workload, beside), rate_rps)
        return self._in_time(demand, self.server(device, workload, beside), rate_rps)

    def within_budget(self, demand: Demand, estimate: Estimate, rate_rps: float) -> bool:
        """Whether a replica that behaves so keeps the rule of the papers: a batch within its part of the SLO."""
        options = self.problem.options
        latency = planned_ms(estimate.latency_ms, options.confidence)
        if not latency < (options.latency_budget or 1.0) * demand.slo.latency_ms:
            return False
        return rate_rps <= self._throughput_rps(estimate) * (1.0 + 1e-9)

    def holds(self, device: Device, partition: PlacedPartition) -> bool:
        """Whether every replica of the partition keeps its SLO at its rate beside the others.

        It does not where the estimator knows nothing of a replica beside others.
        """
        if len(partition.replicas) < 2:
            return True
        try:
            return self._holds_all(device, partition)
        except InputError:
            return False

    def _holds_all(self, device: Device, partition: PlacedPartition) -> bool:
        for replica in partition.replicas:
            beside = partition.beside(replica)
            alone = self.estimate(device, replica.workload)
            # Where neighbours change nothing, the segment has kept its SLO at this rate already.
            if self.estimate(device, replica.workload, beside).latency_ms != alone.latency_ms:
                demand = self.problem.demand(replica.model)
                if not self.meets(demand, device, replica.workload, replica.rate_rps, beside):
                    return False
        return True

    def best(self, demand: Demand, device: Device) -> tuple[Segment, ...]:
        """Return for each share the segment of largest capacity, smallest share first.

        Of equal ones (which serve all that is asked for) that of fewest processes is taken, and the smallest batch
        beyond which the tail is not shortened by another 2%. Shares under which nothing meets the SLO are
        absent.
        """
        key = (demand.model, device.name)
        if key not in self._best:
            shares = self.problem.estimator.shares(demand.model, device)
            found = [self.best_of(demand, device, share) for share in shares]
            self._best[key] = tuple(segment for segment in found if segment is not None)
        return self._best[key]

    def every(self, demand: Demand, device: Device) -> tuple[Segment, ...]:
        """Return every segment that meets the SLO at some rate, by share, processes and batch."""
        key = (demand.model, device.name)
        if key not in self._segments:
            shares = self.problem.estimator.shares(demand.model, device)
            made = (
                self.make(demand, device, workload)
                for share in shares
                for workload in self.workloads(demand.model, device, share)
            )
            self._segments[key] = tuple(segment for segment in made if segment is not None)
        return self._segments[key]

    def largest(self, demand: Demand, device: Device, workloads: Iterable[Workload]) -> Segment | None:
        """Return the segment of largest capacity of these, the first of equal ones; None when nothing meets the SLO."""
        best: tuple[float, int, Segment] | None = None
        ceilings = [(self._ceiling_rps(device, one), -position, one) for position, one in enumerate(workloads)]
        for ceiling, position, workload in sorted(ceilings, key=lambda item: item[:2], reverse=True):
            if best is not None and ceiling < best[0]:
                break  # even batches that are always full could not reach it
            segment = self.make(demand, device, workload, least_rps=0.0 if best is None else best[0])
            if segment is not None and (best is None or (segment.capacity_rps, position) > best[:2]):
                best = (segment.capacity_rps, position, segment)
        return None if best is None else best[2]

    def workloads(self, model: str, device: Device, share: Share) -> Iterator[Workload]:
        """Yield what may run under ``share`` in the listed batches: fewest processes first, then smallest batch."""
        for processes in self.menu.processes(share):
            for batch in self.menu.listed_batches(model, device, share):
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
        """Return the segment that ``workload`` is, None when it fits no memory or meets the SLO at no rate.

        One that cannot serve ``least_rps`` may come with any smaller capacity that it has: it is not looked for. With
        ``whole`` it is None unless it serves all that is asked for.
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
            return None  # nothing is known of this batch, of a smaller one, or of this number of processes
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

    def tail_ms(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> float:
        """Return the planned time at the demand's percentile, with a latency budget the time of one batch."""
        if self.problem.options.latency_budget is not None:
            return self.latency_ms(device, workload, beside)
        server = self.server(device, workload, beside)
        if rate_rps >= server.capacity_rps:
            return math.inf
        queueing = queue_of(self.problem.queueing, demand.model)
        return queueing.sojourn(Arrivals(rate_rps), server).percentile(demand.slo.percentile)

    def memory_bytes(self, estimate: Estimate) -> int | None:
        """Return the memory of all processes of a workload to plan with, as `planned_ms` says of times."""
        if estimate.memory_bytes is None:
            return None
        one = planned_ms(estimate.memory_bytes, self.problem.options.confidence)
        return math.ceil(one) * estimate.workload.processes

    def best_of(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        """Return the segment of largest capacity under ``share``, None when nothing meets the SLO.

        Once a segment serves all that is asked for, larger batches are looked at only while they shorten its tail.
        Where batches between the listed ones may run too, it is the best of all, given that larger batches take longer.
        """
        known = self._best_of.setdefault((demand.model, device.name), {})
        first = self._first_demand(demand)
        if share not in known and first is not demand:
            found = self.best_of(first, device, share)
            known[share] = None if found is None else replace(found, model=demand.model)
        if share not in known:
            best = self._best_listed(demand, device, share)
            if self.menu.is_dense(demand.model, device, share):
                best = self._best_between(demand, device, share, best)
            known[share] = best
        return known[share]

    def leaner(self, demand: Demand, device: Device, best: Segment) -> Iterator[Segment]:
        """Yield the segments under the share of ``best`` in listed batches that hold less memory, the least first.

        Each serves more than all that hold less.
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

    def looked_at(self, demand: Demand, device: Device) -> tuple[Segment, ...]:
        """Return the best segments under the shares that were looked at so far."""
        known = self._best_of.get((demand.model, device.name), {})
        return tuple(segment for segment in known.values() if segment is not None)

    def _best_between(self, demand: Demand, device: Device, share: Share, best: Segment | None) -> Segment | None:
        """Return the best segment of any batch, given the best of those listed."""
        listed = self.menu.listed_batches(demand.model, device, share)
        for processes in self.menu.processes(share):
            gaps = list(zip((0, *listed), listed, strict=False))
            while gaps:
                low, high = gaps.pop()
                reach = self.most_between_rps(demand, device, Workload(demand.model, low, share, processes), high)
                wanted = min(reach, demand.rate_rps) if self._capped else reach
                if high - low < 2 or (best is not None and wanted <= best.capacity_rps):
                    continue
                middle = (low + high) // 2
                found = self.make(demand, device, Workload(demand.model, middle, share, processes))
                if found is not None and (best is None or found.capacity_rps > best.capacity_rps):
                    best = found
                gaps += [(low, middle), (middle, high)]
        return best

    def most_between_rps(self, demand: Demand, device: Device, workload: Workload, high: int) -> float:
        """Return a rate that no batch from that of ``workload`` to below ``high`` exceeds within the latency budget.

        Given that no larger batch is quicker; batch 0 stands for nothing, of which nothing is known.
        """
        if not workload.batch:
            return math.inf
        try:
            estimate = self.estimate(device, workload)
        except InputError:
            return 0.0
        if not self.within_budget(demand, estimate, 0.0):
            return 0.0
        return self._throughput_rps(estimate) * (high - 1) / workload.batch

    def _best_listed(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        whole = self.serving_all(demand, device, share) if self._capped else None
        return whole or self.largest(demand, device, self.workloads(demand.model, device, share))

    def serving_all(self, demand: Demand, device: Device, share: Share) -> Segment | None:
        """Return the best segment under ``share`` that serves all that is asked for, None where no batch does.

        It has the fewest processes, and the smallest batch beyond which the tail is not shortened.
        """
        best: Segment | None = None
        for workload in self.workloads(demand.model, device, share):
            if best is not None and workload.processes > best.processes:
                break
            if self._ceiling_rps(device, workload) < demand.rate_rps:
                continue  # not even full batches serve it
            segment = self.make(demand, device, workload, whole=True)
            if best is None:
                best = segment
            elif segment is None or not self._is_better(demand, segment, best):
                break
            else:
                best = segment
        return best

    def _ceiling_rps(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        """Return a rate that the workload never exceeds; infinity where nothing is known of it."""
        try:
            if self.problem.options.latency_budget is not None:
                return self.throughput_rps(device, workload, beside)
            return 1000.0 * workload.batch * workload.processes / self.latency_ms(device, workload, beside)
        except InputError:
            return math.inf

    def _capacity_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload], least_rps: float
    ) -> float:
        """Return the largest rate within the SLO, at most the demand's; 0 when even a lonely request is too slow."""
        ceiling = self._ceiling_rps(device, workload, beside)
        wanted = min(ceiling, demand.rate_rps) if self._capped else ceiling
        if self.problem.options.latency_budget is not None:
            return wanted if self.meets(demand, device, workload, 0.0, beside) else 0.0
        server = self.server(device, workload, beside)
        idle = ceiling * NEARLY_IDLE
        if not self._in_time(demand, server, min(least_rps, wanted)):
            # Less than ``least_rps`` will not be taken (see `make`): it is enough to know that it serves something.
            return idle if idle < least_rps and self._in_time(demand, server, idle) else 0.0
        queueing = queue_of(self.problem.queueing, demand.model)
        return self.problem.limits.largest_rps(queueing, server, demand.slo, idle, wanted)

    def _is_better(self, demand: Demand, segment: Segment, best: Segment) -> bool:
        """Whether a segment serves more than the best so far, or the same with a shorter tail."""
        if segment.capacity_rps != best.capacity_rps:
            return segment.capacity_rps > best.capacity_rps
        return self.segment_tail_ms(demand, segment) < SHORTER * self.segment_tail_ms(demand, best)

    def segment_tail_ms(self, demand: Demand, segment: Segment) -> float:
        """Return the planned time at the demand's percentile, at all that the segment serves."""
        device = self.problem.device(segment.device)
        return self.tail_ms(demand, device, segment.workload, segment.capacity_rps)

    def _serves_all(self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload]) -> bool:
        return self.meets(demand, device, workload, demand.rate_rps, beside)

    def _in_time(self, demand: Demand, server: BatchServer, rate_rps: float) -> bool:
        queueing = queue_of(self.problem.queueing, demand.model)
        return self.problem.limits.in_time(queueing, server, demand.slo, rate_rps)


def _series(device: Device, workload: Workload) -> tuple[str, str, Share, int]:
    """Return what the batch sizes of one workload have in common."""
    return device.name, workload.model, workload.share, workload.processes
