"""Histograms of times in whole nanoseconds, fine where times are short and coarse where they are long.

A bin is 1/2**(bits - 1) of its value wide or less, whatever the value: percentiles stay that exact in bounded memory.
Only whole numbers are involved, so that every machine counts alike (the layout of HdrHistogram).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Longer times, beyond 19 hours, are counted as this one.
LONGEST_NS = 2**46 - 1
#: Bins of 1/256 of their value, for a model's latencies; of 1/32, for its stages and replicas, of which there are many.
FINE_BITS, COARSE_BITS = 9, 6

Counts = NDArray[np.int64]


def bin_of(value_ns: int, bits: int) -> int:
    """Return the bin that a time belongs to, in a histogram of ``2**(bits - 1)`` bins for each doubling."""
    if value_ns < 1 << bits:
        return value_ns
    value = min(value_ns, LONGEST_NS)
    above = value >> bits
    shift = 0
    for step in (32, 16, 8, 4, 2, 1):
        if above >> step > 0:
            above >>= step
            shift += step
    if above > 0:
        shift += 1
    return (shift << (bits - 1)) + (value >> shift)


def bins(bits: int) -> int:
    """Return the number of bins."""
    return ((46 - bits) << (bits - 1)) + (1 << bits)


def edges_ns(bits: int) -> Counts:
    """Return the lower ends of all bins and the upper end of the last: an ndarray of shape (bins + 1,)."""
    half = 1 << (bits - 1)
    index = np.arange(bins(bits) + 1)
    shift = np.maximum(index // half - 1, 0)
    return np.asarray((index - shift * half) << shift, dtype=np.int64)


def percentile_ms(counts: Counts, bits: int, percent: float) -> float | None:
    """Return the time within which ``percent`` of the counted ones lie, in milliseconds; None of nothing.

    Within a bin the times are taken to lie evenly.
    """
    total = int(counts.sum())
    if total == 0:
        return None
    wanted = percent / 100.0 * total
    upto = np.cumsum(counts)
    position = int(np.searchsorted(upto, wanted, side="left"))
    edges = edges_ns(bits)
    low, high = int(edges[position]), int(edges[position + 1])
    into = (wanted - (int(upto[position]) - int(counts[position]))) / int(counts[position])
    return (low + into * (high - 1 - low)) / 1e6


def cdf_ms(counts: Counts, bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times in ms at which bins that hold something end, and the fraction of all up to there."""
    filled = np.flatnonzero(counts)
    if len(filled) == 0:
        return np.zeros(0), np.zeros(0)
    return (edges_ns(bits)[filled + 1] - 1) / 1e6, np.cumsum(counts[filled]) / counts.sum()
