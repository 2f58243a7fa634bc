"""The law of several gaps in a row, and of the backlog behind them, against what gaps that are drawn come to."""

from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.arrival_process import NS_PER_S, DeterministicArrivals, HyperexponentialArrivals, LognormalArrivals
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.batch_backlog import backlog_law
from gpuprof.estimators.queueing.gap_law import Renewal, sum_law
from gpuprof.estimators.queueing.queueing import BatchQueue
from tests.estimators.queueing.drawn_pools import draw_group, simulate_p99_ms

STEP = 0.1
PROCESSES: tuple[Renewal, ...] = (
    LognormalArrivals(0.9, 4.0),
    HyperexponentialArrivals(0.9, 4.0),
    LognormalArrivals(2.0, 0.5),
)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("count", [1, 5, 16])
def test_gaps_in_a_row_have_the_mean_and_the_variance_of_so_many(process: Renewal, count: int) -> None:
    law = sum_law(process, count, STEP)
    times = STEP * np.arange(len(law))
    mean = float(law @ times)
    assert law.sum() == pytest.approx(1.0)
    assert mean == pytest.approx(count / process.rate_rps, rel=2e-3)
    variance = count * process.scv / process.rate_rps**2
    assert float(law @ (times - mean) ** 2) == pytest.approx(variance, rel=0.04)  # the longest gaps are cut


@pytest.mark.parametrize("process", [LognormalArrivals(7.2, 4.0), HyperexponentialArrivals(6.4, 4.0)], ids=str)
def test_the_backlog_is_what_lindley_s_recursion_comes_to(process: Renewal) -> None:
    group, batches, cv = 8, 200_000, 0.2
    random = np.random.default_rng(5)
    last = process.stream(random).take(group * batches)[group - 1 :: group] / NS_PER_S
    steps = random.gamma(1.0 / cv**2, cv**2, batches - 1) - np.diff(last)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    backlog = walk - np.minimum.accumulate(walk)
    law = backlog_law(process.rate_rps, process.scv, group, 1.0, cv, process)
    assert law is not None
    for probability in (0.7, 0.9, 0.99):
        found = float(law.quantile(np.array([probability]))[0])
        assert found == pytest.approx(float(np.quantile(backlog, probability)), rel=0.08, abs=0.05)


def test_a_pool_near_capacity_waits_for_lognormal_requests_as_a_long_simulation_does() -> None:
    """32 replicas of one request each: sixteen million requests wait 31.4 ms at p99; half a million told 21% more."""
    server = BatchServer((8.2,), 1, 0.0, 1, 0.0)
    rate_rps = 0.923 * 32 * server.capacity_rps
    found = BatchQueue().pool(Arrivals.from_process(LognormalArrivals(rate_rps, 4.0), rate_rps), [server] * 32).whole
    assert found.percentile(99.0) == pytest.approx(31.4, rel=0.05)


@pytest.mark.slow
def test_requests_at_even_gaps_are_solved_at_the_very_load() -> None:
    """What batches of several kinds and even gaps come to jumps with the load: between two loads it was 32% more."""
    servers, load = draw_group(70113)
    rate_rps = load * sum(server.capacity_rps for server in servers)
    process = DeterministicArrivals(rate_rps)
    p99_ms = BatchQueue().pool(Arrivals.from_process(process, rate_rps), servers).whole.percentile(99.0)
    assert p99_ms == pytest.approx(simulate_p99_ms(servers, process, 70113, 250_000), rel=0.02)
