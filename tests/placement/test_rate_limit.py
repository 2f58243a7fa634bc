from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, QueueModel, Sojourn, split_stream
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing
from gpuprof.placement.contract import ExponentialQueue, demand, plain_device, problem
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION, RateLimits
from gpuprof.placement.segment import Segment, Segments
from tests.placement.curved import CurvedEstimator


@dataclass
class SolvedQueueCounter:
    """Counts the queues that are solved."""

    inner: QueueModel
    solved: list[float] = field(default_factory=list)

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        self.solved.append(arrivals.rate_rps)
        return self.inner.sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        return split_stream(self, arrivals, servers)


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


@dataclass
class QuickQueueCounter(SolvedQueueCounter):
    """Obeys the rule of batch formation."""

    is_analytic: bool = True


def test_no_queue_is_asked_for_where_no_batch_is_quick_enough() -> None:
    server, quick = _server(8, 10.0), QuickQueueCounter(BatchQueue())
    slo, most = Slo(0.9 * server.latency_ms[0]), server.capacity_rps
    assert RateLimits().largest_rps(quick, (server,), slo, most * NEARLY_IDLE, most) == 0.0
    assert not quick.solved


def test_rates_above_those_of_the_batches_that_are_quick_enough_are_late_without_a_queue() -> None:
    server, quick = _server(8, 10.0), QuickQueueCounter(BatchQueue())
    slo, limits = Slo(server.latency_ms[1]), RateLimits()  # batches of one and two are in time
    most = 2000.0 / server.latency_ms[1] / 0.99
    assert limits.bound_rps(quick, server, slo) == pytest.approx(most, rel=0.011)
    assert not limits.in_time(quick, (server,), slo, 1.02 * most)
    assert not quick.solved
    assert not limits.in_time(quick, (server,), slo, 0.98 * most)
    assert quick.solved


def test_a_fifth_of_the_queues_of_plain_bisection_need_not_be_solved() -> None:
    plain, guessed = SolvedQueueCounter(BatchQueue()), SolvedQueueCounter(BatchQueue())
    for batch, start, times in ((1, 1.0, 3.0), (2, 4.0, 2.5), (4, 2.0, 4.0), (8, 6.0, 2.0), (8, 1.0, 6.0)):
        server = _server(batch, start)
        slo, most = Slo(times * server.latency_ms[-1]), server.capacity_rps
        RateLimits().largest_rps(guessed, (server,), slo, most * NEARLY_IDLE, most)
        _plain(plain, server, slo, most)
    assert len(guessed.solved) <= 0.8 * len(plain.solved)


def test_what_was_found_for_one_policy_is_not_solved_again_for_another() -> None:
    counting = SolvedQueueCounter(ExponentialQueue())
    limits, server, slo = RateLimits(), _server(4, 2.0), Slo(30.0)
    rate_rps = limits.largest_rps(counting, (server,), slo, server.capacity_rps * NEARLY_IDLE, server.capacity_rps)
    before = len(counting.solved)
    assert limits.in_time(counting, (server,), slo, rate_rps / 2.0)
    assert not limits.in_time(counting, (server,), slo, rate_rps * (1.0 + 2.0 * RATE_PRECISION))
    assert (
        limits.largest_rps(counting, (server,), slo, server.capacity_rps * NEARLY_IDLE, rate_rps / 3.0)
        == rate_rps / 3.0
    )
    assert len(counting.solved) == before


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


def test_a_segment_that_cannot_serve_what_it_must_is_not_looked_at_further() -> None:
    counting = SolvedQueueCounter(ExponentialQueue())
    wanted = demand("m", 1e6, 30.0)
    segments = Segments(problem([wanted]))
    object.__setattr__(segments.problem, "queueing", counting)
    made = segments.make(wanted, plain_device(), Workload("m", 4, Share(50.0)), least_rps=1e5)
    assert made is None or made.capacity_rps < 1e5
    assert len(counting.solved) <= 2
