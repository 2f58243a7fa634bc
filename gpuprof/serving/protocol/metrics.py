"""The server's figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gpuprof.serving.router.neighbour_times import find_neighbour_slowdowns
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_replica import ServedReplica
from gpuprof.serving.watch.statistics import BUCKETS_MS, STAGES, ModelStatistics, ProtocolFigures

#: Content type of the format of `generate_latest`.
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterCollector(Collector):
    """Reads the figures of a router, and of the protocols in front of it, on each scrape."""

    def __init__(self, router: Router, protocol: ProtocolFigures | None = None) -> None:
        self._router, self._protocol = router, protocol

    def collect(self) -> Iterable[Metric]:
        """Return every family with samples."""
        families = _Families()
        models = self._router.list_models()
        now = time.monotonic()
        for model in models:
            _add_model(families, model.name, model.statistics)
            for replica in model.replicas:
                _add_replica(families, model.name, replica, now)
        _add_places(families, [replica for model in models for replica in model.replicas])
        for name, slowdowns in sorted(find_neighbour_slowdowns(models).items()):
            for neighbour, factor in slowdowns.items():
                help_text = "Ratio of batch time to planned batch time, by running neighbours"
                families.gauge("gpuprof_neighbour_slowdown_ratio", help_text, factor, model=name, beside=neighbour)
        used = self._router.arena.used
        families.gauge("gpuprof_buffer_bytes", "Shared memory in use by requests and answers", used)
        if self._protocol is not None:
            _add_protocol(families, self._protocol)
        return families.by_name.values()


def render_metrics(router: Router, protocol: ProtocolFigures | None = None) -> bytes:
    """Return the figures in Prometheus' text format."""
    return generate_latest(RouterCollector(router, protocol))


class _Families:
    """Metric families, each made with its first sample; labels are keyword arguments."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def counter(self, name: str, help_text: str, value: float, **labels: object) -> None:
        """Add a sample of a counter, to whose name prometheus_client appends _total."""
        family = self.by_name.setdefault(name, CounterMetricFamily(name, help_text, labels=list(labels)))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(list(map(str, labels.values())), float(value))

    def gauge(self, name: str, help_text: str, value: float, **labels: object) -> None:
        """Add a sample of a gauge."""
        family = self.by_name.setdefault(name, GaugeMetricFamily(name, help_text, labels=list(labels)))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(list(map(str, labels.values())), float(value))

    def histogram(self, name: str, help_text: str, counts: Sequence[int], total_ns: int, **labels: object) -> None:
        """Add a histogram of latencies, by the counts of `BUCKETS_MS`."""
        family = self.by_name.setdefault(name, HistogramMetricFamily(name, help_text, labels=list(labels)))
        assert isinstance(family, HistogramMetricFamily)
        limits = [*(f"{limit / 1000.0:g}" for limit in BUCKETS_MS), "+Inf"]
        buckets = [(limit, float(count)) for limit, count in zip(limits, accumulate(counts), strict=True)]
        family.add_metric(list(map(str, labels.values())), buckets, total_ns / 1e9)


def _add_model(families: _Families, model: str, statistics: ModelStatistics) -> None:
    late = statistics.answered - statistics.in_slo
    outcomes = {
        "in_slo": statistics.in_slo,
        "late": late,
        "failed": statistics.failed,
        "refused": statistics.refused,
    }
    for outcome, count in outcomes.items():
        families.counter("gpuprof_requests", "Requests by outcome", count, model=model, outcome=outcome)
    help_text = "Time from a request's arrival to its answer"
    families.histogram("gpuprof_latency_seconds", help_text, statistics.buckets, statistics.total_ns, model=model)
    for stage in STAGES:
        families.histogram(
            "gpuprof_stage_latency_seconds",
            "Time of an answered request in each stage",
            statistics.stage_buckets[stage],
            getattr(statistics.stages, stage),
            model=model,
            stage=stage,
        )


def _add_replica(families: _Families, model: str, replica: ServedReplica, now: float) -> None:
    plan, statistics, workers = replica.plan, replica.statistics, replica.workers
    labels = {"model": model, "replica": plan.name, "place": plan.place, "mig": plan.mig}
    for outcome, count in (("in_slo", statistics.in_slo), ("late", statistics.answered - statistics.in_slo)):
        help_text = "Requests answered by a replica"
        families.counter("gpuprof_replica_requests", help_text, count, **labels, outcome=outcome)
    help_text = "Time from arrival to answer of these requests"
    families.histogram("gpuprof_replica_latency_seconds", help_text, statistics.buckets, statistics.total_ns, **labels)
    help_text = "Fraction of the device or MIG instance available to the replica"
    families.gauge("gpuprof_replica_share_ratio", help_text, plan.share_pct / 100.0, **labels)
    families.gauge("gpuprof_replica_planned_rps", "Planned requests per second of the replica", plan.rate_rps, **labels)
    families.gauge("gpuprof_queue_requests", "Requests waiting for a batch", replica.waiting_rows, **labels)
    ready = sum(worker.is_ready for worker in workers)
    families.gauge("gpuprof_workers_ready", "Workers ready to run batches", ready, **labels)
    restarts = sum(worker.restarts for worker in workers)
    families.counter("gpuprof_worker_restarts", "Restarts of workers", restarts, **labels)
    help_text = "Workers that refused to start: changed model file, or missing share"
    families.counter("gpuprof_worker_refusals", help_text, sum(worker.refusals for worker in workers), **labels)
    help_text = "Requests retried after the death of their worker"
    families.counter("gpuprof_requests_retried", help_text, statistics.retried, **labels)
    for size, batch in sorted(statistics.batches.items()):
        families.counter("gpuprof_batches", "Batches by size", batch.count, **labels, size=size)
    times_ms = replica.estimates_ms(now)
    for size in sorted({1, len(times_ms)}):
        help_text = "Time of a batch of this size expected by the router"
        families.gauge("gpuprof_batch_estimate_seconds", help_text, times_ms[size - 1] / 1000.0, **labels, size=size)


def _add_places(families: _Families, replicas: Sequence[ServedReplica]) -> None:
    """Add the replicas' shares of devices and MIG instances.

    Sums of busy times over a place are left to Prometheus: a sum from here would fall when a replica is retired.
    """
    shares: dict[tuple[str, str], float] = {}
    for replica in replicas:
        plan = replica.plan
        work_ns = sum(batch.gather + batch.infer + batch.scatter for batch in list(replica.batches.values()))
        families.counter(
            "gpuprof_replica_busy_seconds",
            "Total time of the replica's workers on batches",
            work_ns / 1e9,
            replica=plan.name,
            place=plan.place,
            mig=plan.mig,
        )
        shares[plan.place, plan.mig] = shares.get((plan.place, plan.mig), 0.0) + plan.share_pct / 100.0
    for (place, mig), share in shares.items():
        help_text = "Fraction of a device or MIG instance in use by replicas"
        families.gauge("gpuprof_place_share_ratio", help_text, share, place=place, mig=mig)


def _add_protocol(families: _Families, figures: ProtocolFigures) -> None:
    """Add refusals with their reasons, and stalls of the router."""
    for (protocol, status, reason), count in sorted(figures.refusals.items()):
        help_text = "Refused requests by HTTP status and reason"
        labels = {"protocol": protocol, "status": status, "reason": reason}
        families.counter("gpuprof_refused_requests", help_text, count, **labels)
    help_text = "Connections refused beyond --max-connections"
    families.counter("gpuprof_refused_connections", help_text, figures.turned_away)
    stalls = figures.stalls
    families.counter("gpuprof_router_stalls", "Stalls of the router's event loop of 50 ms or more", stalls.count)
    families.counter("gpuprof_router_stall_seconds", "Total duration of these stalls", stalls.total_s)
    families.gauge("gpuprof_router_longest_stall_seconds", "Duration of the longest stall", stalls.longest_s)
    if figures.edge_restarts is not None:
        families.counter("gpuprof_edge_restarts", "Restarts of the edge (Envoy)", figures.edge_restarts)
