"""Several replicas behind one router, against a plain simulation that shares no code with the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    BatchPoissonArrivals,
    GammaArrivals,
    RecordedArrivals,
    scale_to_rate,
)
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from tests.estimators.queueing.pool_reference import play_pool

QUEUE = BatchQueue()


def server(
    batch: int, full_ms: float = 10.0, fixed: float = 0.5, cv: float = 0.05, wait_ms: float = 0.0
) -> BatchServer:
    times = tuple(full_ms * (fixed + (1.0 - fixed) * n / batch) for n in range(1, batch + 1))
    return BatchServer(times, batch, wait_ms, latency_cv=cv, overhead_ms=0.5)


POOLS: list[tuple[tuple[BatchServer, ...], float]] = [
    ((server(1),) * 2, 0.8),
    ((server(8),) * 4, 0.3),
    ((server(8),) * 4, 0.9),
    ((server(16, cv=0.3),) * 12, 0.95),
    ((server(1, cv=0.0),) * 24, 0.9),
    ((server(4), server(4), server(16, 25.0), server(2, 6.0, 0.8)), 0.7),
    ((replace(server(6), processes=3), replace(server(4, wait_ms=6.0), pause_factor=1.4, pause_cv=0.2)), 0.6),
]


def capacity_rps(servers: Sequence[BatchServer]) -> float:
    return math.fsum(server.capacity_rps for server in servers)


def near_tail(spent: NDArray[np.float64]) -> Any:
    """Return what is within 3% of the 99th percentile and three standard errors of its own."""
    spread = float(np.std([np.percentile(part, 99) for part in np.array_split(spent, 8)])) / 8**0.5
    p99 = float(np.percentile(spent, 99))
    return pytest.approx(p99, abs=0.03 * p99 + 3.0 * spread)


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), POOLS)
def test_a_pool_is_as_quick_as_in_a_plain_simulation(servers: tuple[BatchServer, ...], load: float) -> None:
    rate = load * capacity_rps(servers)
    arrived = np.cumsum(np.random.default_rng(3).exponential(1000.0 / rate, 60_000))
    spent, by = play_pool(arrived, servers, 4)
    spent, by = spent[4_000:], by[4_000:]
    pool = QUEUE.pool(Arrivals(rate), servers)
    assert pool.whole.percentile(99) == near_tail(spent)
    assert pool.whole.mean_ms == pytest.approx(spent.mean(), rel=0.03 + 0.1 * (load > 0.85))
    limit = float(np.percentile(spent, 95))
    assert pool.whole.fraction_within(limit) == pytest.approx(0.95, abs=0.02)
    shares = np.bincount(by, minlength=len(servers)) / len(by)
    split = np.array([part.rate_rps for part in pool.parts]) / rate
    assert np.abs(split - shares).max() < 0.05 / len(servers) + 0.01
    assert split.sum() == pytest.approx(1.0)


@pytest.mark.slow
def test_many_large_replicas_that_all_begin_idle_are_looked_at_once_they_are_out_of_step() -> None:
    servers = (replace(server(16, cv=0.0, fixed=0.8), processes=3),) * 12
    rate = 0.9 * capacity_rps(servers)
    arrived = np.cumsum(np.random.default_rng(3).exponential(1000.0 / rate, 90_000))
    spent = play_pool(arrived, servers, 4)[0][arrived > 600.0]  # sixty full batches later
    assert QUEUE.pool(Arrivals(rate), servers).whole.percentile(99) == near_tail(spent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        GammaArrivals(1.0, 4.0),
        BatchPoissonArrivals(1.0, 6),
    ],
)
def test_a_pool_takes_arrivals_of_any_shape(shape: ArrivalProcess) -> None:
    servers, load = (server(4),) * 3, 0.7
    rate = load * capacity_rps(servers)
    times = scale_to_rate(shape, rate).stream(np.random.default_rng(5)).take(80_000) / 1e6
    spent = play_pool(times, servers, 6)[0][4_000:]
    pool = QUEUE.pool(Arrivals.from_process(shape, rate), servers).whole
    assert pool.percentile(99) == near_tail(spent)
    assert pool.percentile(50) == pytest.approx(np.percentile(spent, 50), rel=0.04)


def test_shapes_of_equal_variability_have_tails_of_their_own() -> None:
    rate = 0.7 * 3 * server(4).capacity_rps
    tails = [
        QUEUE.pool(Arrivals.from_process(shape, rate), (server(4),) * 3).whole.percentile(99)
        for shape in (GammaArrivals(1.0, 4.0), BatchPoissonArrivals(1.0, 5))
    ]
    assert min(abs(a / b - 1.0) for a, b in itertools.combinations(tails, 2)) > 0.03


@pytest.mark.slow
def test_one_replica_takes_a_recording_as_it_is() -> None:
    replica = server(4, cv=0.0)
    gaps = np.tile([1, 1, 1, 1, 1, 1, 34], 20_000) * 1_000_000
    recorded = RecordedArrivals(np.cumsum(gaps), float(gaps.sum()) / 1e9)
    arrivals = Arrivals.from_process(recorded, recorded.rate_rps)
    spent = play_pool(np.cumsum(gaps) / 1e6, (replica,), 1)[0]
    assert QUEUE.sojourn(arrivals, replica).percentile(90) == pytest.approx(np.percentile(spent, 90), rel=0.05)


def test_the_peak_of_a_long_recording_is_planned_for_wherever_it_lies() -> None:
    servers = (server(4, cv=0.0),) * 2
    calm, peak = (1000.0 / (load * capacity_rps(servers)) for load in (0.3, 1.05))
    gaps = np.random.default_rng(1).exponential(np.concatenate([np.full(700_000, calm), np.full(100_000, peak)]))
    times = np.cumsum(gaps)
    recorded = RecordedArrivals((times * 1e6).astype(np.int64), float(times[-1]) / 1e3)
    arrivals = Arrivals.from_process(recorded, recorded.rate_rps)
    whole, coarse = (QUEUE.pool(arrivals, servers, coarse=coarse).whole for coarse in (False, True))
    first = RecordedArrivals(recorded.times[:524_288], float(times[524_287]) / 1e3)
    assert whole.percentile(95) > 10.0 * QUEUE.pool(Arrivals(first.rate_rps, process=first), servers).whole.percentile(
        95
    )
    assert coarse.percentile(80) == pytest.approx(whole.percentile(80), rel=0.1)
    assert coarse.fraction_within(30.0) == pytest.approx(whole.fraction_within(30.0), abs=0.03)


def test_a_pool_of_one_is_the_replica_alone() -> None:
    arrivals = Arrivals(0.6 * server(8).capacity_rps)
    pool = QUEUE.pool(arrivals, (server(8),))
    assert pool.whole == QUEUE.sojourn(arrivals, server(8))
    assert [part.rate_rps for part in pool.parts] == [arrivals.rate_rps]


def test_a_pool_beyond_its_capacity_never_answers() -> None:
    pool = QUEUE.pool(Arrivals(2.0 * server(8).capacity_rps), (server(8), server(8)))
    assert math.isinf(pool.whole.percentile(50))
    assert sum(part.rate_rps for part in pool.parts) == pytest.approx(2.0 * server(8).capacity_rps)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 12), st.floats(0.2, 0.9), st.integers(2, 40))
def test_sharing_a_stream_is_no_slower_than_splitting_it(batch: int, load: float, count: int) -> None:
    replica = server(batch)
    alone = QUEUE.sojourn(Arrivals(load * replica.capacity_rps), replica).percentile(99)
    pooled = QUEUE.pool(Arrivals(load * count * replica.capacity_rps), (replica,) * count).whole.percentile(99)
    assert pooled <= alone * 1.03


def test_large_pools_wait_less_and_less() -> None:
    replica = server(8)
    tails = [
        QUEUE.pool(Arrivals(0.8 * count * replica.capacity_rps), (replica,) * count).whole.percentile(99)
        for count in (2, 4, 16, 64, 500)
    ]
    assert all(later <= sooner * 1.01 for sooner, later in itertools.pairwise(tails))


def test_a_few_odd_replicas_of_a_large_pool_answer_no_more_than_they_can() -> None:
    many, odd = server(8), server(4, 12.0)
    servers = (*(many,) * 400, odd)
    pool = QUEUE.pool(Arrivals(0.97 * capacity_rps(servers)), servers)
    assert pool.parts[-1].rate_rps < odd.capacity_rps
    assert math.fsum(part.rate_rps for part in pool.parts) == pytest.approx(0.97 * capacity_rps(servers))
    assert pool.parts[0].rate_rps == pytest.approx(0.97 * many.capacity_rps, rel=0.01)


@pytest.mark.parametrize("load", [0.46, 0.5, 0.55, 0.6, 0.65])
def test_a_replica_that_others_leave_little_is_as_busy_as_its_requests_take(load: float) -> None:
    quick, slow = BatchServer((4.5,), 1, 0.0), BatchServer((8.0,), 1, 0.0)
    pool = (*(quick,) * 12, slow)
    part = QUEUE.pool(Arrivals(load * capacity_rps(pool)), pool).parts[-1]
    assert part.rate_rps > 0.0
    assert part.sojourn.utilization == pytest.approx(0.008 * part.rate_rps, rel=0.03)
