"""Histograms of times in whole nanoseconds, with bins of bounded relative width (the layout of HdrHistogram).

A bin is at most 1/2**(bits - 1) of its value wide, which bounds the relative error of percentiles in bounded memory.
Integer arithmetic makes the counts equal on every machine.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: Longest time of the last bin, 19 hours; longer times are counted there.
LONGEST_NS = 2**46 - 1
#: Bins of 1/256 of their value, for a model's latencies; of 1/32, for the many stages and replicas.
FINE_BITS, COARSE_BITS = 9, 6

Counts = NDArray[np.int64]


def bin_of(value_ns: int, bits: int) -> int:
    """Return the bin of a time, in a histogram of ``2**(bits - 1)`` bins per doubling."""
    value = min(value_ns, LONGEST_NS)
    shift = max(0, math.frexp(value)[1] - bits)
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
    """Return the percentile in milliseconds, for ``percent`` from 0 to 100; None of an empty histogram.

    Times are assumed to be uniform within a bin.
    """
    total = int(counts.sum())
    if total == 0:
        return None
    target = percent / 100.0 * total
    cumulative = np.cumsum(counts)
    position = int(np.searchsorted(cumulative, target, side="left"))
    edges = edges_ns(bits)
    low, high = int(edges[position]), int(edges[position + 1])
    into = (target - (int(cumulative[position]) - int(counts[position]))) / int(counts[position])
    return (low + into * (high - 1 - low)) / 1e6


def cdf_ms(counts: Counts, bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the upper ends in ms of non-empty bins, and the cumulative fractions."""
    bins = np.flatnonzero(counts)
    if len(bins) == 0:
        return np.zeros(0), np.zeros(0)
    return (edges_ns(bits)[bins + 1] - 1) / 1e6, np.cumsum(counts[bins]) / counts.sum()
