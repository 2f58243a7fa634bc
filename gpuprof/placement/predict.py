"""Predicts the replicas of a placement and the pools of their models, and renews the times of a map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpuprof.domain.deployment import (
    DeploymentMap,
    Gpu,
    ModelPrediction,
    Partition,
    Replica,
    ReplicaPrediction,
    RequiredCompute,
    RequiredMemory,
)
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Figure, Workload
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.evidence import (
    Evidence,
    ask_batch_series,
    ask_estimator,
    neighbour_workloads,
    replica_workload,
)
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import MEANS, Problem
from gpuprof.placement.segment import Segments
from gpuprof.rules.host_work import disturb_servers
from gpuprof.rules.turns import LoadedReplica, add_waits

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Pool:
    """The queue of all replicas of a model, with the expected times and with those at both interval ends."""

    expected: PoolSojourn
    ends: tuple[PoolSojourn, ...]
    #: Position by the expected server of a replica, and the time of its batch.
    positions: Mapping[tuple[BatchServer, Figure], int]

    def part(self, server: BatchServer, batch_ms: Figure) -> tuple[ServedPart, list[Sojourn]]:
        """Return the sojourn times of one replica of a pool, and those at the interval ends of its batch time."""
        position = self.positions[server, batch_ms]
        return self.expected.parts[position], [end.parts[position].sojourn for end in self.ends]


class Predictor:
    """Predicts a placement with mean times, whatever the planning confidence, and gives intervals.

    The requests of a model go to the replica that is expected to answer first.
    """

    def __init__(self, problem: Problem, gpus: Sequence[PlacedGpu]) -> None:
        self._problem = problem
        self._segments = Segments(replace(problem, options=replace(problem.options, confidence=MEANS)))
        self._goodput: dict[str, float] = {}
        #: By the kind of device and the partition without its start, which a running map may change.
        self._servers: dict[tuple[str, PlacedPartition], tuple[BatchServer, ...]] = {}
        self._pools: dict[str, _Pool] = {}
        if problem.options.latency_budget is None:
            self._pool_replicas(gpus)

    def _pool_replicas(self, gpus: Sequence[PlacedGpu]) -> None:
        """Solve the queue of each model's replicas at their total planned rate."""
        by_model: dict[str, list[tuple[float, BatchServer, Estimate]]] = {}
        for gpu in gpus:
            device = self._problem.device(gpu.device)
            loaded = [self._load(device, part) for part in gpu.partitions]
            # Host work disturbs the batches of a placement on a single machine; see `gpuprof.rules.host_work`.
            if len(gpus) == 1:
                every = [replica for replicas in loaded for replica in replicas]
                servers = iter(disturb_servers(self._problem.options.host, every, self._problem.queueing))
                loaded = [[replace(replica, server=next(servers)) for replica in replicas] for replicas in loaded]
            for partition, replicas in zip(gpu.partitions, loaded, strict=True):
                self._servers[device.name, replace(partition, start=None)] = waiting = add_waits(replicas)
                for placed, server in zip(partition.replicas, waiting, strict=True):
                    estimate = self._segments.estimate(device, placed.workload, partition.beside(placed))
                    by_model.setdefault(placed.model, []).append((placed.rate_rps, server, estimate))
        for model, pool in by_model.items():
            rate = math.fsum(rate_rps for rate_rps, _, _ in pool)
            self._pools[model] = self._solve(model, rate, [(server, estimate) for _, server, estimate in pool])

    def _load(self, device: Device, partition: PlacedPartition) -> list[LoadedReplica]:
        return [
            LoadedReplica(
                self._undisturbed_server(device, placed, partition.beside(placed)),
                placed.rate_rps,
                placed.share.sm_pct,
                placed.turns,
                self._problem.options.time_slice_ms,
            )
            for placed in partition.replicas
        ]

    def _solve(self, model: str, rate_rps: float, replicas: Sequence[tuple[BatchServer, Estimate]]) -> _Pool:
        queueing, arrivals = queue_of(self._problem.queueing, model), Arrivals(rate_rps)
        servers = [server for server, _ in replicas]
        end_servers = [_make_end_servers(server, estimate.latency_ms) for server, estimate in replicas]
        ends = zip(*end_servers, strict=True) if all(end_servers) else ()
        return _Pool(
            queueing.pool(arrivals, servers),
            tuple(queueing.pool(arrivals, end) for end in ends),
            {(server, estimate.latency_ms): position for position, (server, estimate) in enumerate(replicas)},
        )

    def _undisturbed_server(self, device: Device, placed: PlacedReplica, beside: Sequence[Workload]) -> BatchServer:
        server = self._segments.undisturbed_server(device, placed.workload, beside)
        return replace(server, max_wait_ms=placed.max_wait_ms)

    def replicas(self, device: Device, partition: PlacedPartition) -> tuple[Replica, ...]:
        """Return the replicas of a partition of the placement for the map."""
        content = device.name, replace(partition, start=None)
        servers = self._servers.get(content, (None,) * len(partition.replicas))
        return tuple(
            self._predict_replica(device, placed, partition.beside(placed), server)
            for placed, server in zip(partition.replicas, servers, strict=True)
        )

    def _predict_replica(
        self, device: Device, placed: PlacedReplica, beside: Sequence[Workload], server: BatchServer | None
    ) -> Replica:
        estimate = self._segments.estimate(device, placed.workload, beside)
        utilization = placed.rate_rps / estimate.throughput_rps.value
        prediction = ReplicaPrediction(
            **batch_figures(estimate),
            goodput_rps=min(placed.rate_rps, estimate.throughput_rps.value),
            utilization=utilization,
            memory_bytes=placed.memory_bytes,
            creq=_required_compute(placed),
            mreq=_required_memory(placed, estimate),
        )
        latencies, rate_rps = None, placed.rate_rps
        if server is not None:
            latencies = self._undisturbed_server(device, placed, beside).latency_ms
            part, ends = self._pools[placed.model].part(server, estimate.latency_ms)
            prediction, rate_rps = self._with_queueing(prediction, placed.model, part, ends), part.rate_rps
            if placed.turns:  # the replica's part of the time of its worker, without waits
                prediction = prediction.model_copy(update={"utilization": utilization})
        self._goodput[placed.model] = self._goodput.get(placed.model, 0.0) + prediction.goodput_rps
        return Replica(
            model=placed.model,
            batch=placed.batch,
            processes=placed.processes,
            sm_share_pct=placed.share.sm_pct,
            memory_limit_bytes=placed.memory_bytes if is_memory_known(estimate) else None,
            max_wait_ms=placed.max_wait_ms,
            rate_rps=rate_rps,
            batch_latency_ms=latencies,
            predicted=prediction,
            turns=placed.turns,
            time_slice_ms=self._problem.options.time_slice_ms if placed.turns else None,
        )

    def model(self, name: str) -> ModelPrediction:
        """Return the predictions of a model over all its replicas."""
        pool = self._pools.get(name)
        p50, p95, p99 = (
            pool and _drop_infinity(pool.expected.whole.percentile(percent)) for percent in (50.0, 95.0, 99.0)
        )
        return ModelPrediction(goodput_rps=self._goodput.get(name, 0.0), p50_ms=p50, p95_ms=p95, p99_ms=p99)

    def _with_queueing(
        self, prediction: ReplicaPrediction, model: str, part: ServedPart, ends: Sequence[Sojourn]
    ) -> ReplicaPrediction:
        sojourn, rate_rps = part.sojourn, part.rate_rps
        limit = self._problem.demand(model).slo.latency_ms
        return prediction.model_copy(
            update={
                "p50_ms": _drop_infinity(sojourn.percentile(50.0)),
                "p95_ms": _drop_infinity(sojourn.percentile(95.0)),
                "p99_ms": _drop_infinity(sojourn.percentile(99.0)),
                "p99_ms_interval": _make_interval(ends, sojourn, lambda s: s.percentile(99.0)),
                "goodput_rps": rate_rps * sojourn.fraction_within(limit),
                "goodput_rps_interval": _make_interval(ends, sojourn, lambda s: rate_rps * s.fraction_within(limit)),
                "utilization": sojourn.utilization,
            }
        )


def batch_figures(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate's figures for the batches of a replica, as fields of `ReplicaPrediction`."""
    names = ("latency_cv", "pause_factor", "pause_cv", "overlapped_ms")
    return {
        **{name: getattr(estimate, name) for name in names},
        "latency_ms": estimate.latency_ms.value,
        "latency_ms_interval": estimate.latency_ms.interval,
        "throughput_rps": estimate.throughput_rps.value,
        "throughput_rps_interval": estimate.throughput_rps.interval,
        "source": estimate.latency_ms.source,
    }


def is_memory_known(estimate: Estimate) -> bool:
    """Return whether the memory may be enforced as a limit: a guessed limit could end a working process."""
    return estimate.memory_bytes is not None and estimate.memory_bytes.is_observed


def _make_end_servers(server: BatchServer, latency: Figure) -> list[BatchServer]:
    """Return the server at the lower and the upper end of its time's interval; empty without an interval."""
    if latency.low is None or latency.high is None:
        return []
    scales = (latency.low / latency.value, latency.high / latency.value)
    return [replace(server, latency_ms=tuple(scale * ms for ms in server.latency_ms)) for scale in scales]


def _make_interval(ends: Sequence[Sojourn], middle: Sojourn, figure_of: Callable[[Sojourn], float]) -> Interval | None:
    """Return the interval between both ends; None if an end is unknown or the queue grows without bound there.

    Queues are simulated, so where the ends are close, the middle figure may lie slightly beyond them.
    """
    if not ends:
        return None
    figures = [figure_of(sojourn) for sojourn in (*ends, middle)]
    return None if any(map(math.isinf, figures)) else (min(figures), max(figures))


def _required_compute(placed: PlacedReplica) -> RequiredCompute | None:
    if placed.creq is None or placed.creq_metric is None:
        return None
    creq = placed.creq
    return RequiredCompute(metric=placed.creq_metric, pct=creq.value, interval_pct=creq.interval, source=creq.source)


def _required_memory(placed: PlacedReplica, estimate: Estimate) -> RequiredMemory | None:
    """Return the memory requirement a policy planned with."""
    if placed.creq is None or estimate.memory_bytes is None:
        return None
    memory = estimate.memory_bytes.scale_by(placed.processes)
    return RequiredMemory(bytes=memory.value, interval_bytes=memory.interval, source=memory.source)


def _drop_infinity(value: float) -> float | None:
    return None if math.isinf(value) else value


def retime_map(deployment: DeploymentMap, evidence: Evidence, name: str) -> DeploymentMap:
    """Return the map with the times of its replicas by the estimator of ``evidence``, called ``name``.

    Percentiles are left out: they follow from the queue of these times. Raises `InputError` without an estimator, or
    where a replica has no estimate.
    """
    if evidence.estimator is None:
        raise InputError(f"the estimator {name!r} needs a kernel database", "give --db DATABASE")
    retime = partial(_retime_replica, evidence, evidence.estimator)
    planned_with = deployment.planned_with.model_copy(update={"estimator": name})
    return deployment.change_replicas(retime).model_copy(update={"planned_with": planned_with})


def _retime_replica(
    evidence: Evidence, estimator: Estimator, gpu: Gpu, partition: Partition, replica: Replica
) -> Replica:
    device = evidence.devices.get(gpu.device)
    if device is None:
        raise InputError(f"unknown device {gpu.device!r}")
    if replica.batch_latency_ms is not None:
        estimates = ask_batch_series(estimator, device, partition, replica)
    else:
        workload, beside = replica_workload(partition, replica, replica.batch), neighbour_workloads(partition, replica)
        estimates = (ask_estimator(estimator, device, workload, beside),)
    full = estimates[-1]
    predicted = replica.predicted.model_copy(
        update={
            **batch_figures(full),
            "utilization": replica.rate_rps / full.throughput_rps.value,
            # Percentiles of the old times would be wrong beside the new times.
            **dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "p99_ms_interval", "goodput_rps_interval")),
        }
    )
    handover_ms = evidence.host.handover_ms
    times = None if replica.batch_latency_ms is None else tuple(e.latency_ms.value + handover_ms for e in estimates)
    return replica.model_copy(update={"predicted": predicted, "batch_latency_ms": times})
