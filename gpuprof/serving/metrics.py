"""The server's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gpuprof.serving.router import Router
from gpuprof.serving.served_model import ServedModel
from gpuprof.serving.statistics import BUCKETS_MS, STAGES

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterCollector(Collector):
    """Reads the figures of a router at the moment when they are asked for.

    Parameters
    ----------
    router : Router
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        models = self._router.all()
        yield _requests(models)
        yield _seconds(models)
        yield _latencies(models)
        yield from _replicas(models)
        memory = GaugeMetricFamily("gpuprof_buffer_bytes", "Shared memory that requests and answers hold")
        memory.add_metric([], float(self._router.arena.used))
        yield memory


def render(router: Router) -> bytes:
    """Return the figures in Prometheus' text format."""
    return generate_latest(RouterCollector(router))


def _requests(models: list[ServedModel]) -> Metric:
    family = CounterMetricFamily("gpuprof_requests", "Requests by what became of them", labels=["model", "outcome"])
    for model in models:
        own = model.statistics
        for outcome, value in (
            ("in_slo", own.in_slo),
            ("late", own.answered - own.in_slo),
            ("failed", own.failed),
            ("refused", own.refused),
        ):
            family.add_metric([model.name, outcome], value)
    return family


def _seconds(models: list[ServedModel]) -> Metric:
    family = CounterMetricFamily(
        "gpuprof_stage_seconds", "Time that answered requests spent by stage", labels=["model", "stage"]
    )
    for model in models:
        for stage in STAGES:
            family.add_metric([model.name, stage], getattr(model.statistics.stages, stage) / 1e9)
    return family


def _latencies(models: list[ServedModel]) -> Metric:
    family = HistogramMetricFamily(
        "gpuprof_latency_seconds", "Time from a request's arrival to its answer", labels=["model"]
    )
    for model in models:
        total = 0
        buckets = []
        for limit, count in zip((*BUCKETS_MS, float("inf")), model.statistics.buckets, strict=True):
            total += count
            buckets.append(("+Inf" if limit == float("inf") else f"{limit / 1000.0:g}", float(total)))
        family.add_metric([model.name], buckets, model.statistics.total_ns / 1e9)
    return family


def _replicas(models: list[ServedModel]) -> Iterator[Metric]:
    labels = ["model", "replica", "place"]
    waiting = GaugeMetricFamily("gpuprof_queue_requests", "Requests that wait for a batch", labels=labels)
    workers = GaugeMetricFamily("gpuprof_workers_ready", "Workers that take batches", labels=labels)
    restarts = CounterMetricFamily("gpuprof_worker_restarts", "Workers that were started again", labels=labels)
    retried = CounterMetricFamily("gpuprof_requests_retried", "Requests whose worker died", labels=labels)
    batches = CounterMetricFamily("gpuprof_batches", "Batches by their size", labels=[*labels, "size"])
    for model in models:
        for replica in model.replicas:
            own = [model.name, replica.plan.name, replica.plan.place]
            waiting.add_metric(own, float(replica.waiting_rows))
            workers.add_metric(own, float(sum(seat.is_ready for seat in replica.seats)))
            restarts.add_metric(own, float(sum(seat.restarts for seat in replica.seats)))
            retried.add_metric(own, float(replica.statistics.retried))
            for size, batch in sorted(replica.statistics.batches.items()):
                batches.add_metric([*own, str(size)], float(batch.count))
    yield from (waiting, workers, restarts, retried, batches)
