"""Percentiles of a sample with confidence intervals; none where the sample is too small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

#: Probability with which an interval holds the percentile.
CONFIDENCE = 0.95
#: LoadGen's: a percentile is taken from a run only where the chance that the true one is higher is below this.
_LOADGEN_DOUBT = 0.01


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of a sample."""

    value: float
    #: ``low``, ``high``: Ends of its 95% interval, which are values of the sample: nothing is assumed of the
    #: distribution but that values do not depend on one another. None: the sample is too small for that end.
    low: float | None
    high: float | None


def find_percentile(ordered: Sequence[float], percent: float) -> Percentile | None:
    """Return a percentile of a sorted sample; None where fewer values were taken than it takes for one beyond it.

    The interval is that of order statistics (David and Nagaraja, Order Statistics, 3rd ed., §7.1). ``ordered``:
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
    """Return how many requests MLPerf's LoadGen takes at least to report a percentile: 64 for p90, 662 for p99.

    It stops early once at most one request in so many may lie beyond: so that, were the true percentile higher, no more
    than one run in a hundred would show so few. Source: MLPerf Inference Rules, appendix on early stopping;
    mlcommons/inference, loadgen/early_stopping.cc.
    """
    from scipy.stats import binom

    count = 2
    while binom.cdf(1, count, 1.0 - percent / 100.0) > _LOADGEN_DOUBT:
        count += 1
    return count
