"""Replicas that share their model's requests, in plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import BatchPoissonArrivals
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ShapedQueue, Sojourn
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, evidence, plain_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.rate_limit import most_within_rps
from gpuprof.placement.segment import PooledSegments, Segments
from tests.estimators.queueing.pool_reference import play_pool

SERVER = BatchServer((6.0, 8.0, 10.0, 12.0), 4, 0.0)


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


class CountingQueue:
    """Counts the pools of several replicas that it is asked for; has no formula for their load."""

    def __init__(self) -> None:
        self.asked = 0

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        return BatchQueue().sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        self.asked += len(servers) > 1
        return BatchQueue().pool(arrivals, servers, coarse=coarse)


def test_a_replica_that_serves_less_than_the_formula_says_is_corrected_by_its_queue() -> None:
    given = make_problem(4000.0, 14.0)
    demand, device, workload = given.demands[0], given.fleet.entries[0].device, Workload("m", 4, Share(100.0))
    guessed, solved = PooledSegments(given), PooledSegments(replace(given, queueing=CountingQueue()))
    before, exact = guessed.make(demand, device, workload), solved.make(demand, device, workload)
    assert before is not None
    assert exact is not None
    assert before.capacity_rps == pytest.approx(exact.capacity_rps, rel=0.05)
    gpu = PlacedGpu(device.name, (PlacedPartition((before.replica(500.0),)),))
    assert guessed.correct("m", (gpu,) * 7)
    after = guessed.make(demand, device, workload)
    assert after is not None
    assert after.capacity_rps == pytest.approx(exact.capacity_rps, rel=0.01)
    assert not guessed.correct("m", (gpu,) * 7)  # corrected already


def test_two_queues_tell_that_a_replica_among_others_serves_less_than_is_needed() -> None:
    queueing = CountingQueue()
    given = replace(make_problem(4000.0, 14.0), queueing=queueing)
    demand, device, workload = given.demands[0], given.fleet.entries[0].device, Workload("m", 4, Share(100.0))
    segment = PooledSegments(given).make(demand, device, workload)
    assert segment is not None
    searching, queueing.asked = queueing.asked, 0
    assert PooledSegments(given).make(demand, device, workload, least_rps=1.03 * segment.capacity_rps) is None
    assert 1 <= queueing.asked <= 2 < searching
    enough = PooledSegments(given).make(demand, device, workload, least_rps=0.97 * segment.capacity_rps)
    assert enough is not None
    assert enough.capacity_rps == pytest.approx(segment.capacity_rps, rel=0.02)


def test_full_batches_that_answer_less_than_is_needed_are_not_asked_queues() -> None:
    queueing = CountingQueue()
    given = replace(make_problem(4000.0, 14.0), queueing=queueing)
    demand, device, workload = given.demands[0], given.fleet.entries[0].device, Workload("m", 4, Share(100.0))
    segments = PooledSegments(given)
    slower = replace(segments.server(device, workload), latency_ms=(3.0, 4.0, 5.0, 9.0))
    segments.server = lambda *_: slower  # type: ignore[method-assign]
    least = 1.05 * slower.capacity_rps  # of batches of three: 600 requests/s
    assert segments.make(demand, device, workload, least_rps=least) is None
    assert not queueing.asked


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
