"""Replicas that share their model's requests, in plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import BatchPoissonArrivals
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_sources import summarize_map
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import BatchServer, ShapedQueue
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, evidence, plain_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.policies import make_policy
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.rate_limit import most_within_rps
from gpuprof.placement.segment import PooledSegments, Segments
from tests.estimators.queueing.pool_reference import play_pool

SERVER = BatchServer((6.0, 8.0, 10.0, 12.0), 4, 0.0)
#: Tight for what a batch takes, so that streams of their own need many replicas.
TIGHT = (Demand("a", 900.0, Slo(12.0)), Demand("b", 400.0, Slo(20.0)))


def make_problem(rate_rps: float, slo_ms: float, **options: float) -> Problem:
    estimator = LinearEstimator(sizes=(1, 4, 8), percents=(100.0,))
    fleet = Fleet((FleetEntry(plain_device()),))
    return Problem((Demand("m", rate_rps, Slo(slo_ms)),), fleet, estimator, BatchQueue())


def whole_devices(count: int, rate_rps: float) -> tuple[PlacedGpu, ...]:
    replica = PlacedReplica("m", 4, 1, Share(100.0), rate_rps / count, memory_bytes=1)
    return (PlacedGpu("plain", (PlacedPartition((replica,)),)),) * count


def simulated_p99(servers: tuple[BatchServer, ...], rate_rps: float) -> float:
    arrived = np.cumsum(np.random.default_rng(1).exponential(1000.0 / rate_rps, 40_000))
    return float(np.percentile(play_pool(arrived, servers, 2)[0][2_000:], 99.0))


@pytest.mark.slow
def test_a_shared_queue_takes_fewer_devices_than_streams_of_their_own_and_the_map_is_sound() -> None:
    given = make_problem(4000.0, 14.0)
    split, pooled = FirstFitDecreasing().place(given), Optimal().place(given)
    assert len(pooled.gpus) < 0.8 * len(split.gpus)
    assert pooled.unplaced == ()
    assert pooled.lower_bound_gpus is not None
    assert pooled.lower_bound_gpus <= len(pooled.gpus)
    deployment = to_map(given, pooled)
    assert check(deployment, evidence(given)) == ()
    predicted = deployment.models["m"].predicted
    assert predicted is not None
    servers = tuple(
        BatchServer(replica.batch_latency_ms or (), replica.batch, 0.0) for *_, replica in deployment.places()
    )
    assert predicted.p99_ms == pytest.approx(simulated_p99(servers, 4000.0), rel=0.1)
    assert (predicted.p99_ms or 99.0) <= 14.0


def test_rates_in_the_map_are_those_that_the_router_gives_and_add_up() -> None:
    given = make_problem(3000.0, 20.0)
    deployment = to_map(given, Optimal().place(given))
    assert sum(replica.rate_rps for *_, replica in deployment.places()) == pytest.approx(3000.0)


def test_spare_devices_are_dropped_until_one_less_would_be_too_slow() -> None:
    given = make_problem(1500.0, 20.0)
    pools = Pools(given, Segments(given))
    kept = pools.drop_spare(whole_devices(20, 1500.0), Limit(None))
    demand, server = given.demands[0], replace(SERVER, latency_ms=(3.0, 4.0, 5.0, 6.0))
    assert pools.keeps(demand, Counter({server: len(kept)}), 1500.0)
    assert not pools.keeps(demand, Counter({server: len(kept) - 1}), 1500.0)
    assert sum(replica.rate_rps for gpu in kept for replica in gpu.replicas()) == pytest.approx(1500.0)


def test_the_most_that_a_pool_serves_is_in_time_and_more_is_not() -> None:
    given = make_problem(5000.0, 14.0)
    pools, demand = Pools(given, Segments(given)), given.demands[0]
    servers = Counter({SERVER: 3})
    most = pools.most_rps(demand, servers, 5000.0)
    assert pools.keeps(demand, servers, most)
    assert not pools.keeps(demand, servers, 1.01 * most)
    assert pools.most_rps(demand, servers, 0.5 * most) == 0.5 * most


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.floats(1.2, 6.0), st.integers(2, 6), st.floats(0.7, 0.99))
def test_no_replica_exceeds_its_bound_in_a_simulation_that_keeps_the_slo(slack: float, count: int, load: float) -> None:
    slo_ms, servers = slack * SERVER.latency_ms[0], (SERVER,) * count
    rate = load * count * SERVER.capacity_rps
    if simulated_p99(servers, rate) <= slo_ms:
        assert rate <= count * most_within_rps(SERVER, slo_ms, 99.0) * 1.001


def test_a_bound_counts_batches_that_are_in_time_only() -> None:
    assert most_within_rps(SERVER, 9.0, 100.0) == pytest.approx(2000.0 / 8.0, rel=1e-4)
    assert most_within_rps(SERVER, 5.9, 99.0) == 0.0
    assert most_within_rps(SERVER, 1e9, 99.0) == SERVER.capacity_rps
    assert most_within_rps(replace(SERVER, latency_cv=0.3), 12.0, 99.0) < SERVER.capacity_rps


def test_a_replica_among_others_is_offered_for_more_than_alone_and_less_than_the_bound() -> None:
    given = make_problem(4000.0, 14.0)
    demand, device = given.demands[0], given.fleet.entries[0].device
    alone, among = (
        max(segment.capacity_rps for segment in kind(given).best(demand, device)) for kind in (Segments, PooledSegments)
    )
    assert 1.1 * alone < among <= 800.0  # full batches of 8 in 10 ms


def test_one_that_serves_everything_alone_is_offered_for_just_that() -> None:
    given = make_problem(50.0, 30.0)
    demand, device = given.demands[0], given.fleet.entries[0].device
    for kind in (Segments, PooledSegments):
        assert max(segment.capacity_rps for segment in kind(given).best(demand, device)) == 50.0


@pytest.mark.slow
def test_arrivals_in_groups_take_more_devices() -> None:
    calm = make_problem(2000.0, 16.0)
    grouped = replace(calm, queueing=ShapedQueue(BatchQueue(), BatchPoissonArrivals(1.0, 12)))
    few, many = Optimal().place(calm), Optimal().place(grouped)
    assert len(many.gpus) > len(few.gpus)
    assert check(to_map(grouped, many), evidence(grouped)) == ()
    assert check(to_map(calm, few), evidence(grouped)) != ()


@pytest.mark.slow
def test_what_runs_already_stays_where_it_still_serves() -> None:
    given = make_problem(4000.0, 14.0)
    before = to_map(given, Optimal().place(given))
    again = replace(given, demands=(replace(given.demands[0], rate_rps=3990.0),), previous=before)
    assert to_map(again, Optimal().place(again)).predicted.moves == 0


def test_a_fixed_fleet_serves_what_its_replicas_can_together() -> None:
    elastic = make_problem(4000.0, 14.0)
    fixed = replace(elastic, fleet=Fleet((FleetEntry(plain_device(), 3),)))
    split, pooled = FirstFitDecreasing().place(fixed), Optimal().place(fixed)
    assert pooled.rate_rps("m") > 1.1 * split.rate_rps("m")
    assert pooled.upper_bound_goodput_rps is not None
    assert pooled.rate_rps("m") <= pooled.upper_bound_goodput_rps * (1.0 + 1e-6)
    assert check(to_map(fixed, pooled), replace(evidence(fixed), demands=None)) == ()


def test_a_problem_without_devices_is_refused() -> None:
    with pytest.raises(InputError, match="there are no devices to place on"):
        Problem((Demand("m", 1.0, Slo(10.0)),), Fleet(()), LinearEstimator(), BatchQueue())


def make_tight_problem(count: int | None = None) -> Problem:
    return Problem(TIGHT, Fleet((FleetEntry(plain_device(), count),)), LinearEstimator(), BatchQueue())


def test_the_same_policy_needs_fewer_devices_where_replicas_share_their_queue() -> None:
    given = make_tight_problem()
    split, split_map = solve_and_check(make_policy("gpulet"), given)
    pooled, deployment = solve_and_check(make_policy("gpulet", {"pooled": "true"}), given)
    assert pooled.policy == split.policy
    assert len(pooled.gpus) < len(split.gpus)
    assert not pooled.unplaced
    note = f"pooled queues: {len(pooled.gpus)} devices where gpulet has {len(split.gpus)} for split streams"
    assert deployment.planned_with.found_by == note
    assert note in summarize_map(deployment)
    assert split_map.planned_with.found_by is None


def test_on_a_full_fleet_the_pools_serve_more() -> None:
    given = make_tight_problem(count=2)
    split, _ = solve_and_check(make_policy("ffd"), given)
    pooled, _ = solve_and_check(make_policy("ffd", {"pooled": "true"}), given)
    assert split.unplaced
    assert sum(pooled.rates_rps().values()) > 1.05 * sum(split.rates_rps().values())


def test_a_map_that_needs_every_replica_is_the_policys_own() -> None:
    given = replace(make_tight_problem(), demands=(Demand("a", 5.0, Slo(100.0)),))
    split, _ = solve_and_check(make_policy("ffd"), given)
    assert make_policy("ffd", {"pooled": "true"}).place(given) == split


def test_pooled_is_refused_where_there_are_no_queues_and_where_it_says_nothing() -> None:
    with pytest.raises(InputError, match="counts waiting"):
        make_policy("ffd", {"pooled": "true"}).place(replace(make_tight_problem(), options=Options(latency_budget=0.5)))
    with pytest.raises(InputError, match="pooled queues anyway"):
        make_policy("optimal", {"pooled": "true"})
    with pytest.raises(InputError, match="true or false"):
        make_policy("ffd", {"pooled": "perhaps"})
