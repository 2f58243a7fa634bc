"""Histograms of times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.simulator.state import LONGEST_NS, bin_of, bins, cdf_ms, edges_ns, percentile_ms


@settings(deadline=None)  # the first call may compile
@given(value=st.integers(0, LONGEST_NS), bits=st.sampled_from([6, 9]))
def test_a_time_lies_in_its_bin_and_the_bin_is_narrow(value: int, bits: int) -> None:
    edges = edges_ns(bits)
    position = bin_of(value, bits)
    assert edges[position] <= value < edges[position + 1]
    assert edges[position + 1] - edges[position] <= max(1, value / 2 ** (bits - 1))


@pytest.mark.parametrize("bits", [6, 9])
def test_every_bin_is_used_and_the_longest_time_is_in_the_last(bits: int) -> None:
    assert bin_of(LONGEST_NS, bits) == bin_of(2 * LONGEST_NS, bits) == bins(bits) - 1
    assert (np.diff(edges_ns(bits)) > 0).all()


def test_percentiles_are_those_of_the_values() -> None:
    values = np.random.default_rng(3).gamma(2.0, 5e6, 20_000).astype(np.int64)
    counts = np.bincount([bin_of(int(v), 9) for v in values], minlength=bins(9))
    for percent in (50.0, 95.0, 99.0):
        assert percentile_ms(counts, 9, percent) == pytest.approx(np.percentile(values, percent) / 1e6, rel=0.004)
    times, fraction = cdf_ms(counts, 9)
    assert fraction[-1] == 1.0
    assert np.interp(10.0, times, fraction) == pytest.approx((values <= 10e6).mean(), abs=0.005)
