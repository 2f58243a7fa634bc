"""The server's figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gpuprof.serving.protocol.gpu_figures import GpuFigures, local_gpu_figures
from gpuprof.serving.router.neighbour_times import attribute_times, list_replica_times
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ServedReplica
from gpuprof.serving.watch.statistics import BUCKETS_MS, STAGES, ModelStatistics, ProtocolFigures

_StatisticsByModel = Mapping[str, ModelStatistics]
_Replicas = Sequence[tuple[str, ServedReplica]]
#: Content type of the format of `generate_latest`.
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterCollector(Collector):
    """Reads the figures of a router on each scrape.

    Parameters
    ----------
    router : Router
    gpus : callable
        Returns the figures of the GPUs and MIG instances of this machine.
    protocol : ProtocolFigures or None
    """

    def __init__(
        self,
        router: Router,
        gpus: Callable[[], Iterable[GpuFigures]] = local_gpu_figures,
        protocol: ProtocolFigures | None = None,
    ) -> None:
        self._protocol = protocol
        self._router = router
        self._gpus = gpus

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        models = self._router.list_models()
        statistics = {model.name: model.statistics for model in models}
        replicas = [(model.name, replica) for model in models for replica in model.replicas]
        yield _requests(statistics)
        yield _seconds(statistics)
        yield _latencies(statistics)
        yield _stage_latencies(statistics)
        yield from _replicas(replicas)
        yield _estimates(replicas, time.monotonic())
        yield from _places(replicas)
        yield _neighbours(models)
        yield from _devices(self._gpus())
        memory = GaugeMetricFamily("gpuprof_buffer_bytes", "Shared memory in use by requests and answers")
        memory.add_metric([], float(self._router.arena.used))
        yield memory
        if self._protocol is not None:
            yield from _protocol(self._protocol)


def render_metrics(router: Router, protocol: ProtocolFigures | None = None) -> bytes:
    """Return the figures in Prometheus' text format."""
    return generate_latest(RouterCollector(router, protocol=protocol))


def _protocol(figures: ProtocolFigures) -> Iterator[Metric]:
    """Yield refusals with their reasons, and stalls of the router."""
    refusals = CounterMetricFamily(
        # prometheus_client appends _total to the names of counters.
        "gpuprof_refused_requests",
        "Refused requests by HTTP status and reason",
        labels=["protocol", "status", "reason"],
    )
    for (protocol, status, reason), count in sorted(figures.refusals.items()):
        refusals.add_metric([protocol, str(status), reason], float(count))
    rejections = CounterMetricFamily(
        "gpuprof_refused_connections",
        "Connections refused beyond --max-connections",
    )
    rejections.add_metric([], float(figures.turned_away))
    stalls = CounterMetricFamily("gpuprof_router_stalls", "Stalls of the router's event loop of 50 ms or more")
    stalls.add_metric([], float(figures.stalls.count))
    seconds = CounterMetricFamily("gpuprof_router_stall_seconds", "Total duration of these stalls")
    seconds.add_metric([], figures.stalls.total_s)
    longest = GaugeMetricFamily("gpuprof_router_longest_stall_seconds", "Duration of the longest stall")
    longest.add_metric([], figures.stalls.longest_s)
    yield from (refusals, rejections, stalls, seconds, longest)
    if figures.edge_restarts is not None:
        restarts = CounterMetricFamily("gpuprof_edge_restarts", "Restarts of the edge (Envoy)")
        restarts.add_metric([], float(figures.edge_restarts))
        yield restarts


def _requests(models: _StatisticsByModel) -> Metric:
    family = CounterMetricFamily("gpuprof_requests", "Requests by outcome", labels=["model", "outcome"])
    for model, statistics in models.items():
        for outcome, value in _count_outcomes(statistics).items():
            family.add_metric([model, outcome], value)
    return family


def _count_outcomes(statistics: ModelStatistics) -> dict[str, float]:
    return {
        "in_slo": statistics.in_slo,
        "late": statistics.answered - statistics.in_slo,
        "failed": statistics.failed,
        "refused": statistics.refused,
    }


def _seconds(models: _StatisticsByModel) -> Metric:
    family = CounterMetricFamily(
        "gpuprof_stage_seconds", "Total time of answered requests by stage", labels=["model", "stage"]
    )
    for model, statistics in models.items():
        for stage in STAGES:
            family.add_metric([model, stage], getattr(statistics.stages, stage) / 1e9)
    return family


def _latencies(models: _StatisticsByModel) -> Metric:
    family = HistogramMetricFamily(
        "gpuprof_latency_seconds", "Time from a request's arrival to its answer", labels=["model"]
    )
    for model, statistics in models.items():
        family.add_metric([model], _cumulate_counts(statistics.buckets), statistics.total_ns / 1e9)
    return family


def _stage_latencies(models: _StatisticsByModel) -> Metric:
    family = HistogramMetricFamily(
        "gpuprof_stage_latency_seconds", "Time of an answered request in each stage", labels=["model", "stage"]
    )
    for model, statistics in models.items():
        for stage in STAGES:
            buckets = _cumulate_counts(statistics.stage_buckets[stage])
            family.add_metric([model, stage], buckets, getattr(statistics.stages, stage) / 1e9)
    return family


def _cumulate_counts(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: upper end in seconds, and the cumulative count."""
    limits = [f"{limit / 1000.0:g}" for limit in BUCKETS_MS]
    return [(limit, float(total)) for limit, total in zip([*limits, "+Inf"], accumulate(counts), strict=True)]


def _replicas(replicas: _Replicas) -> Iterator[Metric]:
    labels = ["model", "replica", "place", "mig"]
    answers = CounterMetricFamily(
        "gpuprof_replica_requests", "Requests answered by a replica", labels=[*labels, "outcome"]
    )
    seconds = CounterMetricFamily(
        "gpuprof_replica_stage_seconds", "Total time of these requests by stage", labels=[*labels, "stage"]
    )
    latencies = HistogramMetricFamily(
        "gpuprof_replica_latency_seconds", "Time from arrival to answer of these requests", labels=labels
    )
    share = GaugeMetricFamily(
        "gpuprof_replica_share_ratio", "Fraction of the device or MIG instance available to the replica", labels=labels
    )
    planned = GaugeMetricFamily(
        "gpuprof_replica_planned_rps", "Planned requests per second of the replica", labels=labels
    )
    waiting = GaugeMetricFamily("gpuprof_queue_requests", "Requests waiting for a batch", labels=labels)
    workers = GaugeMetricFamily("gpuprof_workers_ready", "Workers ready to run batches", labels=labels)
    restarts = CounterMetricFamily("gpuprof_worker_restarts", "Restarts of workers", labels=labels)
    refusing = CounterMetricFamily(
        "gpuprof_worker_refusals",
        "Workers that refused to start: changed model file, or missing share",
        labels=labels,
    )
    retries = CounterMetricFamily(
        "gpuprof_requests_retried", "Requests retried after the death of their worker", labels=labels
    )
    batches = CounterMetricFamily("gpuprof_batches", "Batches by size", labels=[*labels, "size"])
    for model, replica in replicas:
        label_values, statistics = [model, replica.plan.name, replica.plan.place, replica.plan.mig], replica.statistics
        answers.add_metric([*label_values, "in_slo"], statistics.in_slo)
        answers.add_metric([*label_values, "late"], statistics.answered - statistics.in_slo)
        for stage in STAGES:
            seconds.add_metric([*label_values, stage], getattr(statistics.stages, stage) / 1e9)
        latencies.add_metric(label_values, _cumulate_counts(statistics.buckets), statistics.total_ns / 1e9)
        share.add_metric(label_values, replica.plan.share_pct / 100.0)
        planned.add_metric(label_values, replica.plan.rate_rps)
        waiting.add_metric(label_values, float(replica.waiting_rows))
        workers.add_metric(label_values, float(sum(worker.is_ready for worker in replica.workers)))
        restarts.add_metric(label_values, float(sum(worker.restarts for worker in replica.workers)))
        refusing.add_metric(label_values, float(sum(worker.refusals for worker in replica.workers)))
        retries.add_metric(label_values, float(statistics.retried))
        for size, batch in sorted(statistics.batches.items()):
            batches.add_metric([*label_values, str(size)], float(batch.count))
    yield from (answers, seconds, latencies, share, planned, waiting, workers, restarts, refusing, retries, batches)


def _estimates(replicas: _Replicas, now: float) -> Metric:
    """Return the expected times of a batch of one row and of a full batch, which admission control uses."""
    family = GaugeMetricFamily(
        "gpuprof_batch_estimate_seconds",
        "Time of a batch of this size expected by the router",
        labels=["model", "replica", "place", "mig", "size"],
    )
    for model, replica in replicas:
        plan, times_ms = replica.plan, replica.estimates_ms(now)
        for size in sorted({1, len(times_ms)}):
            family.add_metric([model, plan.name, plan.place, plan.mig, str(size)], times_ms[size - 1] / 1000.0)
    return family


def _places(replicas: _Replicas) -> Iterator[Metric]:
    """Yield the replicas' shares of devices and MIG instances.

    Sums over a place are left to Prometheus: a sum from here would fall when a replica is retired.
    """
    labels = ["replica", "place", "mig"]
    busy = CounterMetricFamily(
        "gpuprof_replica_busy_seconds", "Total time of the replica's workers on batches", labels=labels
    )
    share = GaugeMetricFamily(
        "gpuprof_place_share_ratio", "Fraction of a device or MIG instance in use by replicas", labels=labels[1:]
    )
    shares: dict[tuple[str, str], float] = {}
    for replica in {replica.plan.name: replica for _, replica in replicas}.values():
        plan = replica.plan
        work_ns = sum(batch.gather + batch.infer + batch.scatter for batch in list(replica.batches.values()))
        busy.add_metric([plan.name, plan.place, plan.mig], work_ns / 1e9)
        place = plan.place, plan.mig
        shares[place] = shares.get(place, 0.0) + plan.share_pct / 100.0
    for where, part in shares.items():
        share.add_metric(list(where), part)
    yield from (busy, share)


def _neighbours(models: Sequence[ServedModel]) -> Metric:
    """Return the slow-down by neighbours since the current replicas were started."""
    family = GaugeMetricFamily(
        "gpuprof_neighbour_slowdown_ratio",
        "Ratio of batch time to planned batch time, by running neighbours",
        labels=["model", "beside"],
    )
    for model, cost in sorted(attribute_times(list_replica_times(models)).items()):
        for neighbour, factor in cost.beside.items():
            family.add_metric([model, neighbour], factor)
    return family


def _devices(gpus: Iterable[GpuFigures]) -> Iterator[Metric]:
    """Yield NVML's figures of the GPUs and MIG instances of this machine."""
    labels = ["gpu", "mig", "uuid"]
    sm = GaugeMetricFamily("gpuprof_gpu_sm_ratio", "Fraction of time with a running kernel (NVML)", labels=labels)
    memory = GaugeMetricFamily("gpuprof_gpu_memory_bytes", "Memory in use (NVML)", labels=labels)
    total = GaugeMetricFamily("gpuprof_gpu_memory_total_bytes", "Total memory (NVML)", labels=labels)
    for gpu in gpus:
        label_values = [str(gpu.index), gpu.mig, gpu.uuid]
        if gpu.sm_ratio is not None:
            sm.add_metric(label_values, gpu.sm_ratio)
        memory.add_metric(label_values, float(gpu.memory_bytes))
        total.add_metric(label_values, float(gpu.memory_total_bytes))
    yield from (sm, memory, total)
