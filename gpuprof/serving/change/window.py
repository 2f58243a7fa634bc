"""Rates, late requests and the percentile of a model between two readings of its counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.serving.watch.statistics import BUCKETS_MS, ModelStatistics

#: Standard deviations up to which a deviation is attributed to chance.
SURE = 3.0
#: Planned multiple of a measured rate, and allowed multiple of planned rates and batch times, where the map's interval
#: is not wider; least allowed multiple of planned rates.
HEADROOM, _LESS = 1.2, 0.5


@dataclass(frozen=True, slots=True)
class ServiceWindow:
    """A model's, or a replica's, counts since the server's start, or their differences over a time."""

    seconds: float  #: 0 for counts since the start.
    #: ``arrived``, ``answered``, ``late``, ``refused``: ``late`` are the answers after their deadline.
    arrived: int
    answered: int
    late: int
    refused: int
    buckets: tuple[int, ...]  #: Answers by latency, by `BUCKETS_MS`.

    @classmethod
    def of(cls, parts: Iterable[ModelStatistics]) -> ServiceWindow:
        """Return the sum of the counts since the start; quickly, since requests wait meanwhile."""
        counts = [(p.arrived, p.answered, p.answered - p.in_slo, p.refused, *p.buckets) for p in parts]
        arrived, answered, late, refused, *buckets = map(sum, zip(*counts, strict=True))
        return cls(0.0, arrived, answered, late, refused, tuple(buckets))

    def until(self, after: ServiceWindow, seconds: float) -> ServiceWindow:
        """Return the difference from these counts to ``after``."""
        return ServiceWindow(
            seconds=seconds,
            arrived=after.arrived - self.arrived,
            answered=after.answered - self.answered,
            late=after.late - self.late,
            refused=after.refused - self.refused,
            buckets=tuple(new - old for new, old in zip(after.buckets, self.buckets, strict=True)),
        )

    @property
    def rate_rps(self) -> float:
        """Arriving requests per second."""
        return self.arrived / self.seconds if self.seconds > 0.0 else 0.0

    def breaks_slo(self, percentile: float) -> bool:
        """Return whether the latency at ``percentile`` exceeds the SLO significantly.

        The percentile exceeds the SLO exactly when more than the remaining fraction of the requests is late. A
        refusal counts as a late answer, since only requests that would be late are refused. The chance variation of
        small counts is subtracted.
        """
        total = self.answered + self.refused
        allowance = total * (1.0 - percentile / 100.0)
        return self.late + self.refused > allowance + SURE * math.sqrt(allowance)

    def percentile_ms(self, percentile: float) -> float | None:
        """Return the latency at ``percentile`` of the answers, to within a bucket; None without an answer."""
        return percentile_of(self.buckets, percentile)


def percentile_of(buckets: Sequence[int], percentile: float) -> float | None:
    """Return a percentile of counts by `BUCKETS_MS`, spread evenly within a bucket; None without counts."""
    rank = sum(buckets) * percentile / 100.0
    if rank <= 0.0:
        return None
    below, lower = 0, 0.0
    for count, upper in zip(buckets, (*BUCKETS_MS, math.inf), strict=True):
        if count and below + count >= rank:
            return lower if upper == math.inf else lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return lower


class Departure(StrEnum):
    """How a model's load departs from its plan."""

    RATE = "more requests than planned"
    LATENCY = "batches take longer than planned"
    SLO = "p99 passes the SLO"
    IDLE = "fewer requests than planned"
    QUICK = "batches take less time than planned"

    @property
    def is_short(self) -> bool:
        """Return whether the plan gives too little capacity, rather than too much."""
        return self in (Departure.RATE, Departure.LATENCY, Departure.SLO)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The planned load of a model: rate, percentile, and upper end over mean of its batch times."""

    rate_rps: float
    percentile: float
    slowest: float


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The measured load of a model in a window."""

    window: ServiceWindow
    #: Measured over predicted time of batches of the same sizes; None without batches.
    slowdown: float | None
    #: Slow-down by each neighbour, if the neighbours are the cause of the slow-down.
    beside: Mapping[str, float] = field(default_factory=dict)


def read_planned(deployment: DeploymentMap, model: str) -> PlannedLoad:
    """Return the planned load of a model of a map."""
    entry = deployment.models[model]
    slowest = 1.0
    for _, _, _, replica in deployment.places():
        if replica.model == model:
            plan = replica.predicted
            upper = 1.0 if plan.latency_ms_interval is None else plan.latency_ms_interval[1] / (plan.latency_ms or 1.0)
            slowest = max(slowest, upper, plan.pause_factor)
    return PlannedLoad(entry.rate_rps, entry.percentile, slowest)


def find_departure(plan: PlannedLoad, load: ObservedLoad) -> Departure | None:
    """Return the significant departure of a model from the bounds of its plan; None without one."""
    window = load.window
    chance_rps = SURE * math.sqrt(max(1, window.arrived)) / window.seconds
    slower = max(HEADROOM, plan.slowest)
    if window.rate_rps - chance_rps > HEADROOM * plan.rate_rps:
        return Departure.RATE
    if load.slowdown is not None and load.slowdown > slower:
        return Departure.LATENCY
    if window.breaks_slo(plan.percentile):
        return Departure.SLO
    if window.rate_rps + chance_rps < _LESS * plan.rate_rps:
        return Departure.IDLE
    if load.slowdown is not None and load.slowdown < 1.0 / slower:
        return Departure.QUICK
    return None
