from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import LAST_LOAD, Arrivals, BatchServer, QueueModel, grid_to_load
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing
from gpuprof.placement.contract import ExponentialQueue, demand, plain_device, problem
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION, RateLimits, find_load
from gpuprof.placement.segment import Segment, Segments
from tests.placement.curved import CurvedEstimator


def _plain(queueing: QueueModel, server: BatchServer, slo: Slo, wanted: float) -> float:
    """The largest rate by bisection alone."""

    def in_time(rate: float) -> bool:
        if rate >= server.capacity_rps:
            return False
        return queueing.sojourn(Arrivals(rate), server).percentile(slo.percentile) <= slo.latency_ms

    low, high = server.capacity_rps * NEARLY_IDLE, wanted
    if in_time(wanted):
        return wanted
    if low >= high or not in_time(low):
        return 0.0
    while high - low > RATE_PRECISION * low:
        middle = (low + high) / 2.0
        low, high = (middle, high) if in_time(middle) else (low, middle)
    return low


def _server(batch: int, start: float, cv: float = 0.0) -> BatchServer:
    return BatchServer(tuple(start + n**0.8 for n in range(1, batch + 1)), batch, 0.0, latency_cv=cv)


@given(batch=st.integers(1, 16), start=st.floats(0.1, 20.0), times=st.floats(0.5, 30.0), part=st.floats(0.01, 1.2))
def test_the_largest_rate_is_that_of_plain_bisection(batch: int, start: float, times: float, part: float) -> None:
    server = _server(batch, start)
    slo, wanted = Slo(times * server.latency_ms[0]), part * server.capacity_rps
    rate_rps = RateLimits().largest_rps(ExponentialQueue(), (server,), slo, server.capacity_rps * NEARLY_IDLE, wanted)
    assert rate_rps == _plain(ExponentialQueue(), server, slo, wanted)


@settings(max_examples=12, deadline=None)
@given(batch=st.integers(1, 8), start=st.floats(0.5, 10.0), times=st.floats(1.5, 10.0), cv=st.sampled_from([0.0, 0.1]))
def test_for_real_queues_too(batch: int, start: float, times: float, cv: float) -> None:
    server, model = _server(batch, start, cv), BatchQueue()
    slo, wanted = Slo(times * server.latency_ms[-1]), server.capacity_rps
    rate_rps = RateLimits().largest_rps(model, (server,), slo, server.capacity_rps * NEARLY_IDLE, wanted)
    assert rate_rps == _plain(model, server, slo, wanted)


@pytest.mark.parametrize(
    ("shape", "batch", "part"),
    [("gamma:4", 8, 0.7), ("gamma:9", 8, 0.7), ("batch:8", 4, 0.9)],
)
def test_no_rate_is_in_time_that_is_late_by_the_queue_that_maps_are_checked_by(
    shape: str, batch: int, part: float
) -> None:
    queueing, server = make_queueing(shape, ["m"]), _server(batch, 5.0)
    arrivals = Arrivals(part * server.capacity_rps)
    coarse, fine = (
        queueing.pool(arrivals, (server,), coarse=is_coarse).whole.percentile(99.0) for is_coarse in (True, False)
    )
    for limit_ms in (0.5 * fine, 0.9 * fine, 0.999 * fine):
        assert not RateLimits().in_time(queueing, (server,), Slo(limit_ms), arrivals.rate_rps)
    assert RateLimits().in_time(queueing, (server,), Slo(1.001 * max(coarse, fine)), arrivals.rate_rps)


def test_queues_of_different_models_are_kept_apart() -> None:
    limits, server, slo = RateLimits(), _server(4, 2.0), Slo(15.0)
    idle, most = server.capacity_rps * NEARLY_IDLE, server.capacity_rps
    limits.largest_rps(ExponentialQueue(), (server,), slo, idle, most)
    rate_rps = limits.largest_rps(BatchQueue(), (server,), slo, idle, most)
    assert rate_rps == RateLimits().largest_rps(BatchQueue(), (server,), slo, idle, most)


def _best_plainly(segments: Segments, wanted: Demand, share: Share) -> Segment | None:
    """The best segment under a share, every capacity looked for."""
    best: Segment | None = None
    for workload in segments.workloads(wanted.model, plain_device(), share):
        segment = segments.make(wanted, plain_device(), workload)
        if segment is None:
            continue
        if best is None or segment.capacity_rps > best.capacity_rps:
            best = segment
        elif best.capacity_rps >= wanted.rate_rps:
            tail_ms, least_ms = (segments.segment_tail_ms(wanted, candidate) for candidate in (segment, best))
            if segment.capacity_rps < best.capacity_rps or tail_ms >= 0.98 * least_ms:
                break
            best = segment
    return best


@given(rate=st.floats(1.0, 800.0), slo=st.floats(4.0, 200.0), pct=st.sampled_from([20.0, 60.0, 100.0]))
def test_the_best_segment_is_the_one_found_by_looking_for_every_capacity(rate: float, slo: float, pct: float) -> None:
    wanted = demand("m3", rate, slo)
    made = problem([wanted], estimator=CurvedEstimator())  # type: ignore[arg-type]
    best = Segments(made).best_of(wanted, plain_device(), Share(pct))
    assert best == _best_plainly(Segments(made), wanted, Share(pct))


@given(guess=st.floats(0.0, 1.0), limit=st.floats(1.0, 400.0))
def test_of_a_tail_that_the_grid_follows_the_load_is_found_wherever_the_search_begins(
    guess: float, limit: float
) -> None:
    loads: list[float] = []

    def tail_ms(load: float) -> float:
        loads.append(load)
        return 1.0 / (1.0 - load)

    best_load = find_load(tail_ms, limit, guess)
    beyond = limit < 1.0 / (1.0 - grid_to_load(0))
    assert best_load == (0.0 if beyond else pytest.approx(1.0 - 1.0 / limit, rel=1e-9))
    assert set(loads) <= {grid_to_load(index) for index in range(LAST_LOAD + 1)}
    assert len(loads) == len(set(loads)) <= 12


def test_a_limit_that_is_always_exceeded_leaves_no_load_and_one_that_never_is_the_most_of_the_grid() -> None:
    assert find_load(lambda _: math.inf, 1.0, 0.5) == 0.0
    assert find_load(lambda _: 0.5, 1.0, 0.5) == grid_to_load(LAST_LOAD - 1)


def test_where_the_queue_grows_without_bound_at_the_next_load_the_last_in_time_is_taken() -> None:
    assert find_load(lambda load: 1.0 if load < 0.5 else math.inf, 2.0, 0.3) == max(
        grid_to_load(index) for index in range(LAST_LOAD) if grid_to_load(index) < 0.5
    )
