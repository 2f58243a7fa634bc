"""Percentiles of a sample with confidence intervals; none where the sample is too small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

#: Probability with which an interval holds the percentile.
CONFIDENCE = 0.95
#: LoadGen's: a percentile is valid where the probability of a higher true percentile is below this.
_LOADGEN_DOUBT = 0.01


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of a sample."""

    value: float
    #: ``low``, ``high``: Ends of the 95% interval, which are values of the sample: the interval assumes independent
    #: values, but no distribution. None: the sample is too small for this end.
    low: float | None
    high: float | None


def find_percentile(ordered: Sequence[float], percent: float) -> Percentile | None:
    """Return a percentile of a sorted sample; None where no value of the sample lies beyond it.

    The interval is based on order statistics (David and Nagaraja, Order Statistics, 3rd ed., §7.1). ``ordered``:
    ascending; ``percent``: from 50 to below 100.
    """
    import numpy as np
    from scipy.stats import binom

    count, part = len(ordered), percent / 100.0
    if not count or (part > 0.5 and count * (1.0 - part) < 1.0 - 1e-9):
        return None
    doubt = (1.0 - CONFIDENCE) / 2.0
    below = int(binom.ppf(doubt, count, part))
    above = int(binom.ppf(1.0 - doubt, count, part)) + 1
    return Percentile(
        float(np.quantile(ordered, part)),
        float(ordered[below - 1]) if below >= 1 else None,
        float(ordered[above - 1]) if above <= count else None,
    )


@cache
def loadgen_count(percent: float) -> int:
    """Return the number of requests that MLPerf's LoadGen needs to report a percentile: 64 for p90, 662 for p99.

    It is the smallest number at which, were the true percentile higher, at most one request beyond it would have a
    probability of 1% or less. Source: MLPerf Inference Rules, appendix on early stopping; mlcommons/inference,
    loadgen/early_stopping.cc.
    """
    from scipy.stats import binom

    count = 2
    while binom.cdf(1, count, 1.0 - percent / 100.0) > _LOADGEN_DOUBT:
        count += 1
    return count
