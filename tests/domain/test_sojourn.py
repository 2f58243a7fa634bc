import math

import pytest

from gpuprof.domain.sojourn import Arrivals, BatchServer, ServedPart, Sojourn, mix_parts, split_stream
from gpuprof.placement.contract import ExponentialQueue

UNIFORM = Sojourn(0.5, 1.0, 5.0, ((0.0, 0.0), (0.5, 5.0), (0.99, 9.9), (0.9999, 9.999)))


def test_a_percentile_is_interpolated_and_the_fraction_within_a_limit_inverts_it() -> None:
    assert [UNIFORM.percentile(50), UNIFORM.percentile(25)] == pytest.approx([5.0, 2.5])
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


QUICK = Sojourn(0.1, 1.0, 5.0, ((0.0, 0.0), (1.0, 10.0)))
SLOW = Sojourn(0.1, 1.0, 50.0, ((0.0, 0.0), (1.0, 100.0)))
NEVER = Sojourn(1.0, 1.0, math.inf, ((0.0, math.inf), (1.0, math.inf)))


def test_a_percentile_of_parts_lies_between_theirs_by_their_rates() -> None:
    mixed = mix_parts([ServedPart(10.0, QUICK), ServedPart(10.0, SLOW)])
    # within 20 ms: all of the quick and a fifth of the slow, 60% in all
    assert mixed.percentile(60.0) == pytest.approx(20.0)
    assert mixed.fraction_within(20.0) == pytest.approx(0.6)
    assert mixed.mean_ms == pytest.approx(27.5)


def test_a_part_that_never_answers_is_missing_in_the_tail() -> None:
    mixed = mix_parts([ServedPart(9.0, QUICK), ServedPart(1.0, NEVER)])
    assert mixed.fraction_within(1e9) == pytest.approx(0.9)
    assert math.isinf(mixed.percentile(99.0))


def test_replicas_get_streams_in_proportion_to_their_capacities() -> None:
    servers = [BatchServer((10.0,), 1, 0.0), BatchServer((20.0,), 1, 0.0)]
    streams = split_stream(ExponentialQueue(), Arrivals(60.0), servers)
    assert [part.rate_rps for part in streams.parts] == pytest.approx([40.0, 20.0])
    assert streams.parts[0].sojourn == ExponentialQueue().sojourn(Arrivals(40.0), servers[0])
    assert streams.whole.mean_ms == pytest.approx(
        (2 * streams.parts[0].sojourn.mean_ms + streams.parts[1].sojourn.mean_ms) / 3
    )


def test_balanced_replicas_are_equally_late() -> None:
    servers = [BatchServer((10.0,), 1, 0.0), BatchServer((20.0,), 1, 0.0), BatchServer((10.0,), 1, 0.0)]
    pool = ExponentialQueue().pool(Arrivals(120.0), servers)
    tails = [part.sojourn.percentile(99.0) for part in pool.parts]
    assert tails == pytest.approx([tails[0]] * 3, rel=1e-6)
    assert sum(part.rate_rps for part in pool.parts) == pytest.approx(120.0)
    assert pool.whole.percentile(99.0) <= split_stream(ExponentialQueue(), Arrivals(120.0), servers).whole.percentile(
        99.0
    )
