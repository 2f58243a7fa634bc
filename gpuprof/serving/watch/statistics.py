"""Statistics since the server started: counts, times by stage and latencies of a model, and of the protocols."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuprof.serving.transport.inference import StageTimes

#: Upper ends of the latency histogram's buckets in milliseconds: 0.1, 0.2, 0.5, 1 and so on to 50,000.
BUCKETS_MS = tuple(float(f"{lead}e{power}") for power in range(-1, 5) for lead in "125")
STAGES = ("queue", "gather", "infer", "scatter")


@dataclass(slots=True)
class BatchStatistics:
    """Batches of a size: their number, and nanoseconds of gathering, of the model and of scattering."""

    count: int = 0
    gather: int = 0
    infer: int = 0
    scatter: int = 0


@dataclass(slots=True)
class ModelStatistics:
    """Counts of a model, or of a replica."""

    arrived: int = 0  #: Requests received, with any outcome.
    #: ``answered``, ``in_slo``, ``failed``, ``refused``: Numbers of requests; ``in_slo``: answered within their
    #: deadline (goodput).
    answered: int = 0
    in_slo: int = 0
    failed: int = 0
    refused: int = 0
    rows: int = 0  #: Inferences, a request of n rows counting n.
    batches: dict[int, BatchStatistics] = field(default_factory=dict)  #: Batches by number of rows.
    total_ns: int = 0  #: Time from arrival to answer, of the answered requests.
    failed_ns: int = 0  #: Time from arrival to the error, of the failed requests.
    stages: StageTimes = field(default_factory=StageTimes)  #: Sums over the answered requests.
    last_ms: int = 0  #: Milliseconds since the epoch of the last answer.
    #: Answers by latency: `BUCKETS_MS`, and a last bucket for the rest.
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))
    #: Answers by the time spent in each of `STAGES`.
    stage_buckets: dict[str, list[int]] = field(
        default_factory=lambda: {stage: [0] * (len(BUCKETS_MS) + 1) for stage in STAGES}
    )
    retried: int = 0  #: Requests sent again because their worker died.

    def add_batch(self, rows: int, requests: int, gather: int, infer: int, scatter: int) -> None:
        """Count a batch, whose times apply to each of its requests."""
        statistics = self.batches.get(rows)
        if statistics is None:
            statistics = self.batches[rows] = BatchStatistics()
        statistics.count += 1
        statistics.gather += gather
        statistics.infer += infer
        statistics.scatter += scatter
        stages, buckets = self.stages, self.stage_buckets
        stages.gather += requests * gather
        stages.infer += requests * infer
        stages.scatter += requests * scatter
        buckets["gather"][bisect_left(BUCKETS_MS, gather / 1e6)] += requests
        buckets["infer"][bisect_left(BUCKETS_MS, infer / 1e6)] += requests
        buckets["scatter"][bisect_left(BUCKETS_MS, scatter / 1e6)] += requests

    def add_answer(self, rows: int, total_ns: int, queue_ns: int, in_slo: bool, now_ms: int) -> None:
        """Count an answered request."""
        self.answered += 1
        self.in_slo += in_slo
        self.rows += rows
        self.total_ns += total_ns
        self.stages.queue += queue_ns
        self.last_ms = now_ms
        self.buckets[bisect_left(BUCKETS_MS, total_ns / 1e6)] += 1
        self.stage_buckets["queue"][bisect_left(BUCKETS_MS, queue_ns / 1e6)] += 1

    def add(self, other: ModelStatistics) -> None:
        """Add the counts of another."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_ms = max(self.last_ms, other.last_ms)
        for size, source in list(other.batches.items()):
            target = self.batches.setdefault(size, BatchStatistics())
            for name in ("count", "gather", "infer", "scatter"):
                setattr(target, name, getattr(target, name) + getattr(source, name))
        for stage in STAGES:
            setattr(self.stages, stage, getattr(self.stages, stage) + getattr(other.stages, stage))
            _add_up(self.stage_buckets[stage], other.stage_buckets[stage])
        _add_up(self.buckets, other.buckets)


_COUNTS = ("arrived", "answered", "in_slo", "failed", "refused", "rows", "total_ns", "failed_ns", "retried")


def sum_statistics(parts: Iterable[ModelStatistics]) -> ModelStatistics:
    """Return the sum of several statistics."""
    total = ModelStatistics()
    for part in parts:
        total.add(part)
    return total


def _add_up(totals: list[int], counts: list[int]) -> None:
    for position, count in enumerate(counts):
        totals[position] += count


@dataclass(frozen=True, slots=True)
class ProtocolFigures:
    """Counts of the protocols, in addition to the router's."""

    #: Refusals by protocol, the HTTP status of their reason, and the reason.
    refusals: Mapping[tuple[str, int, str], int]
    turned_away: int  #: Connections beyond the bound.
    edge_restarts: int | None = None  #: Restarts of the edge; None: no edge.
