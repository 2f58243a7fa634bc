"""The server's figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import find_neighbour_slowdowns
from gpuprof.serving.router.served_replica import ServedReplica
from gpuprof.serving.watch.statistics import BUCKETS_MS, ModelStatistics, ProtocolFigures

#: Content type of the format of `generate_latest`.
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


#: Type and description of each family; prometheus_client appends _total to the names of counters.
_FAMILIES: dict[str, tuple[Any, str]] = {
    "gpuprof_requests": (CounterMetricFamily, "Requests by outcome"),
    "gpuprof_latency_seconds": (HistogramMetricFamily, "Time from a request's arrival to its answer"),
    "gpuprof_stage_latency_seconds": (HistogramMetricFamily, "Time of an answered request in each stage"),
    "gpuprof_replica_requests": (CounterMetricFamily, "Requests answered by a replica"),
    "gpuprof_replica_latency_seconds": (HistogramMetricFamily, "Time from arrival to answer of these requests"),
    "gpuprof_replica_share_ratio": (GaugeMetricFamily, "Fraction of the device or MIG instance of the replica"),
    "gpuprof_replica_planned_rps": (GaugeMetricFamily, "Planned requests per second of the replica"),
    "gpuprof_replica_busy_seconds": (CounterMetricFamily, "Total time of the replica's workers on batches"),
    "gpuprof_queue_requests": (GaugeMetricFamily, "Requests waiting for a batch"),
    "gpuprof_workers_ready": (GaugeMetricFamily, "Workers ready to run batches"),
    "gpuprof_worker_restarts": (CounterMetricFamily, "Restarts of workers"),
    "gpuprof_worker_refusals": (
        CounterMetricFamily,
        "Workers that refused to start: changed model file, or missing share",
    ),
    "gpuprof_requests_retried": (CounterMetricFamily, "Requests retried after the death of their worker"),
    "gpuprof_batches": (CounterMetricFamily, "Batches by size"),
    "gpuprof_batch_estimate_seconds": (GaugeMetricFamily, "Time of a batch of this size expected by the router"),
    "gpuprof_neighbour_slowdown_ratio": (
        GaugeMetricFamily,
        "Ratio of batch time to planned batch time, by running neighbours",
    ),
    "gpuprof_buffer_bytes": (GaugeMetricFamily, "Shared memory in use by requests and answers"),
    "gpuprof_refused_requests": (CounterMetricFamily, "Refused requests by HTTP status and reason"),
    "gpuprof_refused_connections": (CounterMetricFamily, "Connections refused beyond --max-connections"),
    "gpuprof_edge_restarts": (CounterMetricFamily, "Restarts of the edge (Envoy)"),
}


def render_metrics(router: Router, protocol: ProtocolFigures | None = None) -> bytes:
    """Return the figures of a router, and of the protocols in front of it, in Prometheus' text format."""
    families = _Families()
    models = router.list_models()
    now = time.monotonic()
    for model in models:
        _add_model(families, model.name, model.statistics)
        for replica in model.replicas:
            _add_replica(families, model.name, replica, now)
    for name, slowdowns in sorted(find_neighbour_slowdowns(models).items()):
        for neighbour, factor in slowdowns.items():
            families.add("gpuprof_neighbour_slowdown_ratio", factor, model=name, beside=neighbour)
    families.add("gpuprof_buffer_bytes", router.arena.used)
    if protocol is not None:
        _add_protocol(families, protocol)
    return generate_latest(families)


class _Families(Collector):
    """Metric families, each made with its first sample; labels are keyword arguments."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        """Return every family with samples."""
        return self._by_name.values()

    def add(self, name: str, value: float, **labels: object) -> None:
        """Add a sample of a counter or a gauge."""
        self._find(name, labels).add_metric(list(map(str, labels.values())), float(value))

    def add_histogram(self, name: str, counts: Sequence[int], total_ns: int, **labels: object) -> None:
        """Add a histogram of latencies, by the counts of `BUCKETS_MS`."""
        limits = [*(f"{limit / 1000.0:g}" for limit in BUCKETS_MS), "+Inf"]
        buckets = [(limit, float(count)) for limit, count in zip(limits, accumulate(counts), strict=True)]
        self._find(name, labels).add_metric(list(map(str, labels.values())), buckets, total_ns / 1e9)

    def _find(self, name: str, labels: Mapping[str, object]) -> Any:
        if name not in self._by_name:
            kind, text = _FAMILIES[name]
            self._by_name[name] = kind(name, text, labels=list(labels))
        return self._by_name[name]


def _add_model(families: _Families, model: str, statistics: ModelStatistics) -> None:
    outcomes = {
        "in_slo": statistics.in_slo,
        "late": statistics.answered - statistics.in_slo,
        "failed": statistics.failed,
        "refused": statistics.refused,
    }
    for outcome, count in outcomes.items():
        families.add("gpuprof_requests", count, model=model, outcome=outcome)
    families.add_histogram("gpuprof_latency_seconds", statistics.buckets, statistics.total_ns, model=model)
    for stage, buckets in statistics.stage_buckets.items():
        total_ns = getattr(statistics.stages, stage)
        families.add_histogram("gpuprof_stage_latency_seconds", buckets, total_ns, model=model, stage=stage)


def _add_replica(families: _Families, model: str, replica: ServedReplica, now: float) -> None:
    plan, statistics, workers = replica.plan, replica.statistics, replica.workers
    labels = {"model": model, "replica": plan.name, "place": plan.place, "mig": plan.mig}
    for outcome, count in (("in_slo", statistics.in_slo), ("late", statistics.answered - statistics.in_slo)):
        families.add("gpuprof_replica_requests", count, **labels, outcome=outcome)
    families.add_histogram("gpuprof_replica_latency_seconds", statistics.buckets, statistics.total_ns, **labels)
    families.add("gpuprof_replica_share_ratio", plan.share_pct / 100.0, **labels)
    families.add("gpuprof_replica_planned_rps", plan.rate_rps, **labels)
    busy_ns = sum(batch.gather + batch.infer + batch.scatter for batch in list(statistics.batches.values()))
    families.add("gpuprof_replica_busy_seconds", busy_ns / 1e9, **labels)
    families.add("gpuprof_queue_requests", replica.waiting_rows, **labels)
    families.add("gpuprof_workers_ready", sum(worker.is_ready for worker in workers), **labels)
    families.add("gpuprof_worker_restarts", sum(worker.restarts for worker in workers), **labels)
    families.add("gpuprof_worker_refusals", sum(worker.refusals for worker in workers), **labels)
    families.add("gpuprof_requests_retried", statistics.retried, **labels)
    for size, batch in sorted(statistics.batches.items()):
        families.add("gpuprof_batches", batch.count, **labels, size=size)
    times_ms = replica.latency.times_ms(now)
    for size in sorted({1, len(times_ms)}):
        families.add("gpuprof_batch_estimate_seconds", times_ms[size - 1] / 1000.0, **labels, size=size)


def _add_protocol(families: _Families, figures: ProtocolFigures) -> None:
    """Add refusals with their reasons, and restarts of the edge."""
    for (protocol, status, reason), count in sorted(figures.refusals.items()):
        families.add("gpuprof_refused_requests", count, protocol=protocol, status=status, reason=reason)
    families.add("gpuprof_refused_connections", figures.turned_away)
    if figures.edge_restarts is not None:
        families.add("gpuprof_edge_restarts", figures.edge_restarts)
