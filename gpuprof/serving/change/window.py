"""Rates, late requests and the percentile of a model between two readings of its counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuprof.serving.watch.statistics import BUCKETS_MS, ModelStatistics

#: Standard deviations up to which a deviation is attributed to chance.
SURE = 3.0


@dataclass(frozen=True, slots=True)
class ServiceWindow:
    """Differences of a model's, or a replica's, counts over a time."""

    seconds: float
    #: ``arrived``, ``answered``, ``late``, ``refused``: ``late`` are the answers after their deadline.
    arrived: int
    answered: int
    late: int
    refused: int
    buckets: tuple[int, ...]  #: Answers by latency, by `BUCKETS_MS`.

    @property
    def rate_rps(self) -> float:
        """Arriving requests per second."""
        return self.arrived / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def goodput_rps(self) -> float:
        """Requests answered in time, per second."""
        return (self.answered - self.late) / self.seconds if self.seconds > 0.0 else 0.0

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


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Counts at a moment, cheap to take while requests wait."""

    arrived: int
    answered: int
    in_slo: int
    refused: int
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, parts: Iterable[ModelStatistics]) -> ServiceCounts:
        """Return the sum of several counts."""
        windows = list(parts)
        return cls(
            arrived=sum(part.arrived for part in windows),
            answered=sum(part.answered for part in windows),
            in_slo=sum(part.in_slo for part in windows),
            refused=sum(part.refused for part in windows),
            buckets=tuple(map(sum, zip(*(part.buckets for part in windows), strict=True))),
        )

    def until(self, after: ServiceCounts, seconds: float) -> ServiceWindow:
        """Return the difference from these counts to ``after``."""
        return ServiceWindow(
            seconds=seconds,
            arrived=after.arrived - self.arrived,
            answered=after.answered - self.answered,
            late=(after.answered - after.in_slo) - (self.answered - self.in_slo),
            refused=after.refused - self.refused,
            buckets=tuple(new - old for new, old in zip(after.buckets, self.buckets, strict=True)),
        )


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
