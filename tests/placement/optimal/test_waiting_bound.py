from __future__ import annotations

import math
import random
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import plain_device
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import bound_table
from gpuprof.placement.optimal.bound_table import BoundTable
from gpuprof.placement.optimal.column_generation import solve_relaxation
from gpuprof.placement.optimal.restricted_master import RestrictedMaster, group_demands
from gpuprof.placement.optimal.waiting_bound import least_rate_within, refused_part
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.optimal.summed import BATCHES, PERCENTS, SummedEstimator


@pytest.mark.parametrize(("load", "work"), [(0.5, 2.0), (0.9, 6.5), (1.2, 3.3), (0.97, 15.0)])
def test_the_refused_part_is_that_of_a_simulation(load: float, work: float) -> None:
    draw, left, refused, count = random.Random(0), 0.0, 0, 300_000
    for _ in range(count):
        left = max(0.0, left - draw.expovariate(load))
        if left + 1.0 <= work:
            left += 1.0
        else:
            refused += 1
    assert refused / count == pytest.approx(refused_part(load, work), rel=0.05, abs=3e-4)


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.floats(0.5, 20.0), min_size=1, max_size=3),
    batch=st.integers(1, 8),
    each=st.floats(0.05, 4.0),
    load=st.floats(0.1, 0.95),
    percent=st.sampled_from([90.0, 99.0]),
)
def test_no_pool_that_keeps_a_percentile_serves_less_at_its_best(
    starts: list[float], batch: int, each: float, load: float, percent: float
) -> None:
    servers = [BatchServer(tuple(start + each * n for n in range(1, batch + 1)), batch, 0.0) for start in starts]
    rate = load * math.fsum(server.capacity_rps for server in servers)
    limit = 1.05 * BatchQueue().pool(Arrivals(rate), servers).whole.percentile(percent)
    most = math.fsum(
        max((1000.0 * n / ms for n, ms in enumerate(server.latency_ms, 1) if ms <= limit), default=0.0)
        for server in servers
    )
    needed = 1000.0 * least_rate_within(rate / 1000.0, limit, 1.0 - percent / 100.0)
    assert rate * percent / 100.0 * (1.0 - 1e-9) <= needed <= most


def _least_devices(given: Problem) -> float:
    """The least shares of up to three replicas that keep the SLO of the only demand together, alone everywhere."""
    segments, (demand,), device = Segments(given), given.demands, given.fleet.entries[0].device
    workloads = [Workload(demand.model, batch, Share(pct)) for pct in PERCENTS for batch in BATCHES]
    best = math.inf
    for count in (1, 2, 3):
        for chosen in combinations_with_replacement(workloads, count):
            taken = math.fsum(device.fraction(replica.share) for replica in chosen)
            servers = [segments.undisturbed_server(device, replica) for replica in chosen]
            if taken < best and demand.rate_rps < math.fsum(server.capacity_rps for server in servers):
                whole = given.queueing.pool(Arrivals(demand.rate_rps), servers).whole
                best = taken if whole.percentile(demand.slo.percentile) <= demand.slo.latency_ms else best
    return best


def _draw_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    estimator = SummedEstimator(disturbance=0.3, spread=0.0, sizes=BATCHES, interval=0.0)
    demands = (Demand("m0", draw.uniform(200.0, 900.0), Slo(draw.uniform(6.0, 16.0))),)
    return Problem(demands, Fleet((FleetEntry(plain_device()),)), estimator, BatchQueue(), Options())


def _bound_devices(given: Problem, *, settles: bool) -> float:
    """The relaxation over the bounds of all replicas, the queues of single ones solved or not."""
    table = BoundTable(given, given.fleet.entries)
    while settles and table.settle(table.list_choices()):
        pass
    master = RestrictedMaster(given.fleet.entries, group_demands(given.demands, table.list_choices()), relaxed=True)
    return solve_relaxation(master, {"plain": 1.0}, Limit())[1]


@pytest.mark.parametrize("seed", range(6))
def test_no_replicas_that_keep_the_slo_together_cost_less_than_the_bound(seed: int) -> None:
    given = _draw_problem(seed)
    assert 0.0 < _bound_devices(given, settles=True) <= _least_devices(given) + 1e-6


def test_the_bound_counts_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [_bound_devices(_draw_problem(seed), settles=False) for seed in range(6)]
    monkeypatch.setattr(bound_table, "find_least_rps", lambda given, demand: 0.0)
    busy = [_bound_devices(_draw_problem(seed), settles=False) for seed in range(6)]
    assert all(waiting_rps >= busy_rps - 1e-6 for waiting_rps, busy_rps in zip(waiting, busy, strict=True))
    assert math.fsum(waiting) > 1.02 * math.fsum(busy)
