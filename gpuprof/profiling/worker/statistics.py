"""Figures of a sample of latencies, and the sample's stability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, quantiles, stdev

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Figures of a sample, named as the columns in the database."""

    repeats: int
    latency_mean_ms: float
    latency_std_ms: float
    latency_p50_ms: float
    #: ``latency_p50_low_ms``, ``latency_p50_high_ms``: 95% confidence interval of the median, from order statistics:
    #: nothing is assumed of the distribution.
    latency_p50_low_ms: float | None
    latency_p50_high_ms: float | None
    #: ``latency_p95_ms``, ``latency_p99_ms``: None for samples of fewer than 20 or 100 values, too small for the
    #: percentile.
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    stable: bool  #: The interval is within the requested precision, the halves agree, nothing disturbed.


def summarize(latencies_ms: Sequence[float], precision: float, undisturbed: bool = True) -> LatencyStats:
    """Return the figures of ``latencies_ms``, given in order of measurement; at least one value is required.

    ``undisturbed``: False marks the sample unstable.
    """
    ordered = sorted(latencies_ms)
    interval = median_interval(ordered)
    return LatencyStats(
        repeats=len(ordered),
        latency_mean_ms=fmean(ordered),
        latency_std_ms=stdev(ordered) if len(ordered) > 1 else 0.0,
        latency_p50_ms=median(ordered),
        latency_p50_low_ms=interval[0] if interval else None,
        latency_p50_high_ms=interval[1] if interval else None,
        latency_p95_ms=percentile(ordered, 95),
        latency_p99_ms=percentile(ordered, 99),
        stable=undisturbed and is_median_known(ordered, precision) and _halves_agree(latencies_ms, precision),
    )


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median of a sorted sample; None for fewer than six values.

    The number of values below the true median is binomial with p = 1/2; the interval runs between the order
    statistics that this leaves out on either side, by its normal approximation, rounded outwards.
    """
    n = len(ordered)
    if 1.0 - 2.0 * 0.5**n < _CONFIDENCE:  # not even the whole range holds the median with that probability
        return None
    reach = NormalDist().inv_cdf((1.0 + _CONFIDENCE) / 2) * math.sqrt(n)
    low, high = max(0, math.floor((n - reach) / 2)), min(n - 1, math.ceil((n + reach) / 2))
    return ordered[low], ordered[high]


def is_median_known(ordered: Sequence[float], precision: float) -> bool:
    """Return whether the interval's half-width is within ``precision`` of the median of a sorted sample."""
    interval = median_interval(ordered)
    if interval is None:
        return False
    return (interval[1] - interval[0]) / 2.0 <= precision * median(ordered)


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Return a percentile from 50 to 99 of a sample, linear between its neighbours.

    None for a sample too small to have a value beyond it.
    """
    if len(ordered) * (100 - percent) < 100:
        return None
    return quantiles(ordered, n=100, method="inclusive")[percent - 1]


def _halves_agree(latencies: Sequence[float], precision: float) -> bool:
    """Return whether the medians of both halves are as close as expected for two samples of this precision.

    An interval from order statistics assumes independent values; a clock that drops, or a neighbour that wakes up
    halfway, makes the interval narrow around a median valid for neither half.
    """
    middle = len(latencies) // 2
    first, second = median(latencies[:middle]), median(latencies[middle:])
    return abs(first - second) <= 2.0 * precision * median(latencies)
