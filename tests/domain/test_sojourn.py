from __future__ import annotations

import math

import pytest

from gpuprof.domain.sojourn import BatchServer, Sojourn

UNIFORM = Sojourn(0.5, 1.0, 5.0, ((0.0, 0.0), (0.5, 5.0), (0.99, 9.9), (0.9999, 9.999)))


def test_a_percentile_is_interpolated_between_the_given_quantiles() -> None:
    assert UNIFORM.percentile(50) == 5.0
    assert UNIFORM.percentile(25) == pytest.approx(2.5)
    assert UNIFORM.percentile(99) == pytest.approx(9.9)


def test_the_fraction_within_a_limit_inverts_the_percentile() -> None:
    for limit in (1.0, 4.0, 7.0, 9.9):
        assert UNIFORM.percentile(100 * UNIFORM.fraction_within(limit)) == pytest.approx(limit)
    assert UNIFORM.fraction_within(100.0) == 1.0
    assert UNIFORM.fraction_within(0.0) == 0.0


def test_nobody_is_answered_in_time_when_the_queue_grows_without_bound() -> None:
    hopeless = Sojourn(1.2, 8.0, math.inf, ((0.0, math.inf), (0.9999, math.inf)))
    assert hopeless.percentile(50) == math.inf
    assert hopeless.fraction_within(1e9) == 0.0


def test_the_capacity_counts_full_batches_of_all_processes() -> None:
    assert BatchServer((4.0, 5.0), batch=2, max_wait_ms=0.0, processes=3).capacity_rps == 1200.0
