from __future__ import annotations

import math

import pytest

from gpuprof.domain.sojourn import Arrivals, BatchServer, ServedPart, Sojourn, mix_parts, split_stream
from gpuprof.placement.contract import ExponentialQueue

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
