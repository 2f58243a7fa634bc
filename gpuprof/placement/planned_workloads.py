"""Cached estimates of workloads, at the planned end of their intervals; equivalent demands share their results.

Tenants often demand the same service of a model under many names: results for the first of them hold for all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import NormalDist

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    MEASURED,
    BatchSeriesEstimator,
    Estimate,
    Figure,
    NamingEstimator,
    Workload,
    batch_times,
    classify_source,
)
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.evidence import is_rounded_to
from gpuprof.placement.placement import PlacedPartition
from gpuprof.placement.problem import Problem
from gpuprof.rules.batching import padded_size
from gpuprof.rules.host_work import disturb_at_worst
from gpuprof.rules.turns import (
    LoadedReplica,
    add_waits,
    estimate_turn,
    find_cycle_ms,
    involves_turns,
    list_firsts,
    without_turn_mates,
)


def planned_ms(latency: Figure, confidence: float | None) -> float:
    """Return the time that plans use: the upper end of the interval at ``confidence``, for 0 the mean.

    Without a confidence, measured and interpolated figures are used as they are and all others at their upper end. The
    figure's interval holds 90%; other confidences follow from a normal distribution through it.

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


class PlannedWorkloads:
    """Times, memory and throughput of workloads on devices, with the estimates cached.

    Requests do not wait for a batch to fill (``max_wait_ms`` 0): a free process takes the waiting requests, so batches
    grow with the load, and waiting would only lengthen the tail without raising the capacity.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._all_rps = math.fsum(demand.rate_rps for demand in problem.demands)
        answers = problem.answers.of(problem.estimator)
        self._estimates, self._refusals, self._times_ms = answers.estimates, answers.refusals, answers.times_ms
        self._servers: dict[tuple[str, Workload], BatchServer] = {}
        self._series = problem.estimator if isinstance(problem.estimator, BatchSeriesEstimator) else None
        self._full_rps: dict[tuple[str, str, Share, int], dict[int, float]] = {}
        self._first_alike = {model: first for model, first in find_alike(problem).items() if model != first}
        self._as_first: dict[Workload, Workload] = {}

    def first_alike(self, model: str) -> str:
        """Return the model of the first equivalent demand, whose results hold for this model."""
        return self._first_alike.get(model, model)

    def _first_workload(self, workload: Workload) -> Workload:
        if workload.model not in self._first_alike:
            return workload
        if workload not in self._as_first:
            self._as_first[workload] = replace(workload, model=self._first_alike[workload.model])
        return self._as_first[workload]

    def _first_demand(self, demand: Demand) -> Demand:
        """Return the first equivalent demand; the demand itself where it differs from the problem's demand."""
        first = self._first_alike.get(demand.model)
        return demand if first is None or demand != self.problem.demand(demand.model) else self.problem.demand(first)

    def estimate(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> Estimate:
        """Return the estimator's answer, cached by query; equivalent demands use the first demand's answer."""
        if self._first_alike:
            self.problem.limits.check_time()  # many equivalent demands make a million cached queries
            workload, beside = self._first_workload(workload), [self._first_workload(neighbour) for neighbour in beside]
        # Sorted: the order of neighbours does not matter.
        key = (device.name, workload, tuple(sorted(beside)) if beside else ())
        if key in self._refusals:
            raise self._refusals[key].with_traceback(None)
        if key not in self._estimates:
            self.problem.limits.check_time()
            try:
                if involves_turns(workload, key[2]):
                    self._estimates[key] = estimate_turn(partial(self.estimate, device), workload, key[2])
                else:
                    self._estimates[key] = self.problem.estimator.estimate(
                        workload.model, device, workload.batch, workload.share, key[2], workload.processes
                    )
            except InputError as error:
                self._refusals[key] = error.with_traceback(None)
                raise
        return self._estimates[key]

    def latency_ms(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        """Return the planned mean time of a batch."""
        return planned_ms(self.estimate(device, workload, beside).latency_ms, self.problem.options.confidence)

    def throughput_rps(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> float:
        """Return the planned requests per second of all processes when every batch is full."""
        return self._throughput_rps(self.estimate(device, workload, beside))

    def _throughput_rps(self, estimate: Estimate) -> float:
        workload = estimate.workload
        time = planned_ms(estimate.latency_ms, self.problem.options.confidence) - estimate.overlapped_ms
        return 1000.0 * workload.batch * workload.processes / time

    def server(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> BatchServer:
        """Return a replica as a queue with the largest possible delay by host work for all demands."""
        key = (device.name, workload)
        if beside or key not in self._servers:
            undisturbed = self.undisturbed_server(device, workload, beside)
            server = disturb_at_worst(self.problem.options.host, undisturbed, self._all_rps)
            if beside:
                return server
            self._servers[key] = server
        return self._servers[key]

    def undisturbed_server(self, device: Device, workload: Workload, beside: Sequence[Workload] = ()) -> BatchServer:
        """Return a replica as a queue without host work: times for 1, 2, … ``batch`` requests."""
        estimate = self.estimate(device, workload, beside)
        handover_ms = self.problem.options.host.handover_ms
        padding = estimate.padding
        if padding is Padding.FULL:
            times = (planned_ms(estimate.latency_ms, self.problem.options.confidence),) * workload.batch
        else:
            times = self._latencies_ms(device, workload, beside)
            sizes = [padded_size(rows, workload.batch, padding) for rows in range(1, workload.batch + 1)]
            times = tuple(times[size - 1] for size in sizes)
        return BatchServer(
            latency_ms=tuple(ms + handover_ms for ms in times),
            batch=workload.batch,
            max_wait_ms=0.0,
            processes=workload.processes,
            latency_cv=estimate.latency_cv,
            pause_factor=estimate.pause_factor,
            pause_cv=estimate.pause_cv,
            overhead_ms=self.problem.options.overhead_ms,
        )

    def _latencies_ms(self, device: Device, workload: Workload, beside: Sequence[Workload]) -> tuple[float, ...]:
        """Return the times of 1, 2, … ``batch`` requests without padding; cached, and reused for larger batches."""
        workload, confidence = self._first_workload(workload), self.problem.options.confidence
        neighbours = tuple(sorted(map(self._first_workload, beside)))
        series = device.name, workload.model, workload.share, workload.processes, workload.turns, neighbours, confidence
        times_ms = self._times_ms.setdefault(series, [])
        missing = range(len(times_ms) + 1, workload.batch + 1)
        if missing or self._first_alike:
            self.problem.limits.check_time()
        if missing and neighbours:
            times_ms += [self.latency_ms(device, replace(workload, batch=batch), neighbours) for batch in missing]
        elif missing:
            arguments = workload.model, device, missing, workload.share, workload.processes
            times_ms += [planned_ms(time, confidence) for time in batch_times(self.problem.estimator, *arguments)]
        return tuple(times_ms[: workload.batch])

    def servers(self, device: Device, partition: PlacedPartition) -> tuple[BatchServer, ...]:
        """Return the replicas of a partition at their rates, slowed by their neighbours and by waits for turns.

        Raises `InputError` where a replica has no estimate beside the others.
        """
        loaded, slice_ms = [], self.problem.options.time_slice_ms
        for replica in partition.replicas:
            concurrent = without_turn_mates(replica.workload, partition.beside(replica))
            server = replace(self.server(device, replica.workload, concurrent), max_wait_ms=replica.max_wait_ms)
            loaded.append(LoadedReplica(server, replica.rate_rps, replica.share.sm_pct, replica.turns, slice_ms))
        return add_waits(loaded)

    def is_claimed(self, device: Device, workload: Workload) -> bool:
        """Return whether an estimator claims, by a measured requirement, that an unmeasured share slows no batch down.

        Several such replicas can exceed their device's capacity, so the total work of claimed shares must be checked.
        """
        if workload.share.sm_pct == 100.0:
            return False
        held = self.estimate(device, workload)
        if classify_source(held.latency_ms.source) == MEASURED or not any(f.is_observed for _, f in held.creq_pct):
            return False
        full = self.estimate(device, replace(workload, share=Share(mig=workload.share.mig)))
        return is_rounded_to(held.latency_ms.value, full.latency_ms.value)

    def memory_bytes(self, estimate: Estimate, *, has_context: bool = True) -> int | None:
        """Return the planned memory of all processes of a workload, by the rule of `planned_ms`.

        ``has_context``: False for a model of a worker whose context is counted with another model.
        """
        if estimate.memory_bytes is None:
            return None
        of_process = math.ceil(planned_ms(estimate.memory_bytes, self.problem.options.confidence))
        return (of_process if has_context else estimate.added_bytes(of_process)) * estimate.workload.processes

    def with_memory(self, device: Device, partition: PlacedPartition) -> PlacedPartition:
        """Return a partition with the memory of its replicas, each worker's context with its first replica.

        Raises `InputError` where a replica has no estimate.
        """
        firsts = list_firsts([replica.turns for replica in partition.replicas])
        estimates = [self.estimate(device, replica.workload) for replica in partition.replicas]
        replicas = tuple(
            replace(replica, memory_bytes=self.memory_bytes(estimate, has_context=is_first))
            for replica, estimate, is_first in zip(partition.replicas, estimates, firsts, strict=True)
        )
        return replace(partition, replicas=replicas)

    def keeps_slos(self, device: Device, partition: PlacedPartition) -> bool:
        """Return whether every replica keeps its SLO at its rate, beside its neighbours and with its turns.

        False where the estimator refuses a query.
        """
        demands = [self.problem.demand(replica.model) for replica in partition.replicas]
        try:
            if self.problem.options.latency_budget is not None:
                return self._keeps_budgets(device, partition, demands)
            servers = zip(demands, partition.replicas, self.servers(device, partition), strict=True)
            return all(self._is_in_time(demand, server, replica.rate_rps) for demand, replica, server in servers)
        except InputError:
            return False

    def _keeps_budgets(self, device: Device, partition: PlacedPartition, demands: Sequence[Demand]) -> bool:
        replicas = partition.replicas
        estimates = [self.estimate(device, replica.workload, partition.beside(replica)) for replica in replicas]
        times_ms = [planned_ms(estimate.latency_ms, self.problem.options.confidence) for estimate in estimates]
        for position, (demand, estimate, replica) in enumerate(zip(demands, estimates, replicas, strict=True)):
            if replica.turns:
                mates_ms = [
                    times_ms[number]
                    for number, mate in enumerate(replicas)
                    if mate.turns == replica.turns and number != position
                ]
                ms = find_cycle_ms(times_ms[position], mates_ms, self.problem.options.time_slice_ms)
                estimate = replace(estimate, latency_ms=Figure(ms, estimate.latency_ms.source))
            if not self.is_within_budget(demand, estimate, replica.rate_rps):
                return False
        return True

    def tail_ms(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> float:
        """Return the planned time at the demand's percentile, with a latency budget the time of a batch."""
        if self.problem.options.latency_budget is not None:
            return self.latency_ms(device, workload, beside)
        server = self.server(device, workload, beside)
        if rate_rps >= server.capacity_rps:
            return math.inf
        queueing = queue_of(self.problem.queueing, demand.model)
        return queueing.sojourn(Arrivals(rate_rps), server).percentile(demand.slo.percentile)

    def meets(
        self, demand: Demand, device: Device, workload: Workload, rate_rps: float, beside: Sequence[Workload] = ()
    ) -> bool:
        """Return whether a replica serves ``rate_rps`` within the demand's SLO, with ``beside`` on the same device.

        False where the estimator refuses a query; under the queueing model also for any smaller batch.
        """
        try:
            if self.problem.options.latency_budget is not None:
                return self.is_within_budget(demand, self.estimate(device, workload, beside), rate_rps)
            return self._is_in_time(demand, self.server(device, workload, beside), rate_rps)
        except InputError:
            return False

    def _serves_all(self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload]) -> bool:
        return self.meets(demand, device, workload, demand.rate_rps, beside)

    def _is_in_time(self, demand: Demand, server: BatchServer, rate_rps: float) -> bool:
        queueing = queue_of(self.problem.queueing, demand.model)
        return self.problem.limits.in_time(queueing, (server,), demand.slo, rate_rps)

    def is_within_budget(self, demand: Demand, estimate: Estimate, rate_rps: float) -> bool:
        """Return whether a replica with this estimate keeps the papers' rule: a batch within its part of the SLO."""
        options = self.problem.options
        latency = planned_ms(estimate.latency_ms, options.confidence)
        if not latency < (options.latency_budget or 1.0) * demand.slo.latency_ms:
            return False
        return rate_rps <= self._throughput_rps(estimate) * (1.0 + 1e-9)

    def _ceiling_rps(
        self, demand: Demand, device: Device, workload: Workload, beside: Sequence[Workload] = ()
    ) -> float:
        """Return an upper bound of the workload's rate; 0 without an estimate, or if a batch exceeds the budget."""
        try:
            if self.problem.options.latency_budget is None:
                return 1000.0 * workload.batch * workload.processes / self.latency_ms(device, workload, beside)
            if self._series is not None and not beside:
                rate_rps = self.full_rps(device, workload)
                latency_ms = 1000.0 * workload.batch * workload.processes / rate_rps
                return rate_rps if latency_ms < self.problem.options.latency_budget * demand.slo.latency_ms else 0.0
            estimate = self.estimate(device, workload, beside)
            return self._throughput_rps(estimate) if self.is_within_budget(demand, estimate, 0.0) else 0.0
        except InputError:
            return 0.0

    def full_rps(self, device: Device, workload: Workload) -> float:
        """Return `throughput_rps` without neighbours, from the fastest figures that the estimator can compute.

        Raises `InputError` where the estimator has no answer.
        """
        if self._series is None:
            return self.throughput_rps(device, workload)
        rates = self.load_full_rps(device, workload, (workload.batch,))
        if not rates[workload.batch]:
            raise InputError(f"{workload.model} has no estimate at batch {workload.batch} under {workload.share}")
        return rates[workload.batch]

    def load_full_rps(self, device: Device, workload: Workload, batches: Sequence[int]) -> Mapping[int, float]:
        """Return `full_rps` of the workload by batch size, of these batches and others; 0.0 without an estimate.

        All missing batches are one query, halved while the estimator refuses any of them.
        """
        model = self.first_alike(workload.model)
        rates = self._full_rps.setdefault((device.name, model, workload.share, workload.processes), {})
        queries = [[batch for batch in batches if batch not in rates]]
        while self._series is not None and queries:
            if not (query := queries.pop()):
                continue
            self.problem.limits.check_time()
            try:
                times = self._series.batch_times(model, device, query, workload.share, workload.processes)
            except InputError:
                half = len(query) // 2
                queries += [query[half:], query[:half]] if half else []
                rates |= {query[0]: 0.0} if not half else {}
                continue
            for batch, alone in zip(query, times, strict=True):
                latency_ms = planned_ms(self._slow_down(device, workload, alone), self.problem.options.confidence)
                rates[batch] = 1000.0 * batch * workload.processes / latency_ms
        return rates

    def _slow_down(self, device: Device, workload: Workload, alone: Figure) -> Figure:
        """Return the time of a workload without known neighbours: subclasses may slow it down."""
        return alone

    def holds(self, device: Device, partition: PlacedPartition) -> bool:
        """Return whether every replica of the partition keeps its SLO at its rate beside the others.

        False where a replica has no estimate beside the others.
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
            isolated = self.estimate(device, replica.workload)
            # The segment keeps its SLO at this rate already where neighbours change nothing.
            if self.estimate(device, replica.workload, beside).latency_ms != isolated.latency_ms:
                demand = self.problem.demand(replica.model)
                if not self.meets(demand, device, replica.workload, replica.rate_rps, beside):
                    return False
        return True


def find_alike(problem: Problem) -> Mapping[str, str]:
    """Return for each demand's model the model of the first equivalent demand.

    Models are compared by the estimates of a few workloads of each, alone and beside neighbours: models are equivalent
    when times and memory agree to the last digit. Failures beside neighbours are recorded by model name.
    """
    key = (problem.demands, id(problem.estimator), id(problem.queueing))
    if key not in problem.alike:
        # Both objects are kept with the result: otherwise another object could reuse a deleted object's id.
        problem.alike[key] = (problem.estimator, problem.queueing), dict(_pair_with_first(problem))
    return problem.alike[key][1]


def _pair_with_first(problem: Problem) -> Iterator[tuple[str, str]]:
    estimator = problem.estimator
    groups: defaultdict[tuple[Demand, int], list[str]] = defaultdict(list)
    for demand in problem.demands:
        arrive = id(queue_of(problem.queueing, demand.model))  # of the same arrival law, at the same rate
        groups[replace(demand, model="", source_model=None, file=None), arrive].append(demand.model)
    groups_failed = (run for run in problem.tried.failed if run.beside)
    failed = {workload.model for run in groups_failed for workload in (run.workload, *run.beside)}
    for names in groups.values():
        first_names: dict[object, str] = {}
        probes: dict[str, tuple[Estimate, ...]] = {}
        for name in names:
            model = estimator.source_of(name) if isinstance(estimator, NamingEstimator) else name
            if model not in probes:
                probes[model] = tuple(_probe(problem, name)) if len(names) > 1 else ()
            figures = probes[model]
            source = (problem.demand(name).source_model or name) if name in failed else None
            yield name, first_names.setdefault((figures, source), name) if any(figures) else name


def _probe(problem: Problem, model: str) -> Iterator[Estimate]:
    """Yield the estimates of the smallest, a middle and the largest workload, on each kind of device."""
    for entry in problem.fleet.entries:
        with suppress(InputError):
            shares = problem.estimator.shares(model, entry.device)
            for place in (0, len(shares) // 2, -1) if shares else ():
                sizes = problem.estimator.batches(model, entry.device, shares[place])
                workload = Workload(model, sizes[place if place < 1 else len(sizes) // 2], shares[place])
                yield _ask(problem, entry.device, workload, ())
                if place > 0:
                    yield _ask(problem, entry.device, workload, (workload,))


def _ask(problem: Problem, device: Device, workload: Workload, neighbours: tuple[Workload, ...]) -> Estimate:
    estimate = problem.estimator.estimate(workload.model, device, workload.batch, workload.share, neighbours)
    return replace(estimate, workload=replace(workload, model=""))
