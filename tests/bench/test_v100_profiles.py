"""The published V100 profiles are whole."""

import pytest

from bench.v100_profiles import v100_profiles


def test_the_published_v100_profiles_are_whole() -> None:
    published = v100_profiles()
    assert (published.device, len(published.rows), len({row.model for row in published.rows})) == ("v100", 71, 13)
    assert "Elvinger" in published.source
    first = published.rows[0]
    assert (first.model, first.batch, first.latency_ms, first.throughput_rps) == ("alexnet", 4, 1.4, 2801.75)
    assert (first.memory_pct, first.max_occupancy_pct) == (1.66, 69.17)
    assert (first.wavg_occupancy_pct, first.wavg_sm_util_pct) == (18.68, 47.07)
    assert len({(row.model, row.batch) for row in published.rows}) == len(published.rows)


def test_what_is_illegible_in_the_published_profiles_is_none() -> None:
    rows = {(row.model, row.batch): row for row in v100_profiles().rows}
    assert rows["resnext50_32x4d", 16].latency_ms is None
    assert rows["inception_v3", 128].max_occupancy_pct is None


def test_published_throughput_is_batch_by_latency_and_percentages_are_ordered() -> None:
    for row in v100_profiles().rows:
        if row.latency_ms is not None and row.throughput_rps is not None:
            assert row.batch / row.latency_ms * 1000 == pytest.approx(row.throughput_rps, rel=0.03), row
        if row.max_occupancy_pct is not None and row.wavg_occupancy_pct is not None:
            assert 0 < row.wavg_occupancy_pct < row.max_occupancy_pct <= 100, row
