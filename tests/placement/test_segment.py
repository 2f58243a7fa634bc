"""Segments, their largest rates, covers of a demand, and replicas that share their model's requests."""

from collections import Counter
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
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel, ShapedQueue
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing, plan_map
from gpuprof.placement.bin import cheapest_cover, make_cost, share_out_rate
from gpuprof.placement.contract import (
    ExponentialQueue,
    LinearEstimator,
    demand,
    evidence,
    plain_device,
    problem,
)
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.policies import make_policy
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.rate_limit import NEARLY_IDLE, RATE_PRECISION, RateLimits, most_within_rps
from gpuprof.placement.search_space import MOST_DEVICES, refuse_oversized
from gpuprof.placement.segment import PooledSegments, Segment, Segments
from tests.estimators.queueing.pool_reference import play_pool
from tests.placement.curved import CurvedEstimator

#: 100 requests/s on the whole device at any batch, whatever share.
SLOW = LinearEstimator(start_ms=0.0, each_ms=10.0, interval=0.0)


def test_the_papers_rule_gives_full_throughput_when_a_batch_is_within_its_part_of_the_slo() -> None:
    given = problem([demand("m", 1e6, 20.1)], options=Options(latency_budget=0.5))
    (half, whole) = Segments(given).best(given.demands[0], plain_device())
    # batch 8 takes (2 + 8) / f ms: 10 ms on the whole device; on half of it batch 3, which is not listed, as long
    assert (half.share, half.batch) == (Share(50.0), 3)
    assert half.capacity_rps == pytest.approx(300.0)
    assert (whole.share, whole.batch) == (Share(100.0), 8)
    assert whole.capacity_rps == pytest.approx(800.0)


def test_a_segment_is_not_offered_more_than_its_demand() -> None:
    given = problem([demand("m", 10.0)])
    assert {segment.capacity_rps for segment in Segments(given).best(given.demands[0], plain_device())} == {10.0}


def test_of_equal_capacities_and_tails_the_smallest_batch_and_fewest_processes_win() -> None:
    given = problem([demand("m", 0.01)], options=Options(max_processes=3))
    best = Segments(given).best(given.demands[0], plain_device())
    assert {(segment.batch, segment.processes) for segment in best} == {(1, 1)}


def test_a_segment_that_does_not_fit_the_memory_is_no_segment() -> None:
    given = problem(
        [demand("m", 10.0)], estimator=LinearEstimator(memory_bytes=9 * 2**30), options=Options(max_processes=2)
    )
    device = plain_device()
    assert Segments(given).make(given.demands[0], device, Workload("m", 1, Share(), 2)) is None
    assert Segments(given).make(given.demands[0], device, Workload("m", 1, Share(), 1)) is not None


@given(slo=st.floats(5.0, 200.0), rate=st.floats(1.0, 2000.0), looser=st.floats(1.0, 3.0))
def test_a_looser_slo_never_lowers_a_capacity(slo: float, rate: float, looser: float) -> None:
    def capacity(limit_ms: float) -> float:
        given = problem([demand("m", rate, limit_ms)])
        made = Segments(given).make(given.demands[0], plain_device(), Workload("m", 4, Share(50.0)))
        return 0.0 if made is None else made.capacity_rps

    assert capacity(slo * looser) >= capacity(slo)


@given(slo=st.floats(5.0, 200.0), rate=st.floats(1.0, 2000.0))
def test_a_capacity_is_met_and_little_more_is_not(slo: float, rate: float) -> None:
    given = problem([demand("m", rate, slo)])
    segments, wanted, device = Segments(given), given.demands[0], plain_device()
    workloads = [Workload("m", batch, Share(pct)) for batch in (1, 2, 4, 8) for pct in (25.0, 50.0, 100.0)]
    for workload in workloads:
        segment = segments.make(wanted, device, workload)
        if segment is None:
            continue
        assert segments.meets(wanted, device, workload, segment.capacity_rps)
        if segment.capacity_rps < rate:
            assert not segments.meets(wanted, device, workload, segment.capacity_rps * 1.02)


def test_a_rate_that_no_plan_of_a_size_serves_is_refused_before_it_is_planned() -> None:
    given = problem([demand("net", 1e7)], estimator=SLOW)
    with pytest.raises(InputError, match="10,000,000 requests/s of net would take at least 100,000 devices") as refused:
        plan_map(given, make_policy("optimal"))
    assert "correct rate_rps" in refused.value.fix


def test_rates_up_to_the_limit_are_planned_and_the_quickest_device_counts() -> None:
    refuse_oversized(problem([demand("net", 100.0 * MOST_DEVICES)], estimator=SLOW))
    with pytest.raises(InputError, match="would take at least 2,001 devices"):
        refuse_oversized(problem([demand("net", 100.0 * (MOST_DEVICES + 1))], estimator=SLOW))


def test_a_fleet_that_is_counted_limits_the_plan_itself() -> None:
    given = problem([demand("net", 1e7)], [(plain_device(), 3)], SLOW)
    planned = plan_map(given, make_policy("ffd"))
    assert planned.predicted.gpus <= 3 and planned.unplaced


def segment(pct: float, capacity_rps: float) -> Segment:
    return Segment("m", "plain", Share(pct), 1, 1, capacity_rps, pct / 100.0, None, 1.0)


COST = make_cost(problem([demand("m")], [(plain_device(price=2.0), None)]))


def test_the_efficient_segment_is_taken_as_often_as_it_fits_and_a_small_one_for_the_rest() -> None:
    cover = cheapest_cover(Demand("m", 215.0, Slo(1.0)), [segment(10, 20), segment(40, 100), segment(100, 180)], COST)
    assert [part.share.sm_pct for part, _ in cover.parts] == [40.0, 40.0, 10.0]
    assert cover.missing_rps == 0.0


def test_few_replicas_allowed_means_larger_ones() -> None:
    demand = Demand("m", 150.0, Slo(1.0), max_replicas=1)
    cover = cheapest_cover(demand, [segment(10, 20), segment(40, 100), segment(100, 180)], COST)
    assert [part.share.sm_pct for part, _ in cover.parts] == [100.0]


@given(
    rate=st.floats(0.1, 1e4),
    sizes=st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 500.0)), min_size=1, max_size=5),
)
def test_a_cover_serves_the_whole_rate_and_overloads_nobody(rate: float, sizes: list[tuple[float, float]]) -> None:
    cover = cheapest_cover(Demand("m", rate, Slo(1.0)), [segment(*size) for size in sizes], COST)
    assert abs(sum(part for _, part in cover.parts) - rate) < 1e-6 * rate
    assert all(part <= segment.capacity_rps * (1 + 1e-9) for segment, part in cover.parts)


def test_load_is_shared_out_by_capacity() -> None:
    cover = share_out_rate(60.0, [segment(10, 40), segment(20, 80)])
    assert [rate for _, rate in cover.parts] == [20.0, 40.0]


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
def test_no_rate_is_in_time_that_is_late_by_the_queue_of_the_check(shape: str, batch: int, part: float) -> None:
    queueing, server = make_queueing(shape, ["m"]), _server(batch, 5.0)
    arrivals = Arrivals(part * server.capacity_rps)
    coarse, fine = (
        queueing.pool(arrivals, (server,), coarse=is_coarse).whole.percentile(99.0) for is_coarse in (True, False)
    )
    for limit_ms in (0.5 * fine, 0.9 * fine, 0.999 * fine):
        assert not RateLimits().in_time(queueing, (server,), Slo(limit_ms), arrivals.rate_rps)
    assert RateLimits().in_time(queueing, (server,), Slo(1.001 * max(coarse, fine)), arrivals.rate_rps)


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


def test_options_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match="aware must be true or false but got 'perhaps'"):
        make_policy("igniter", {"aware": "perhaps"})


@pytest.mark.parametrize("rate_rps", [50.0, 150.0, 300.0, 450.0, 700.0])
def test_a_share_can_serve_all_where_it_has_a_segment_that_does(rate_rps: float) -> None:
    given = replace(problem([demand("m", rate_rps, 30.0)]), queueing=BatchQueue())
    segments, wanted, device = PooledSegments(given), given.demands[0], plain_device()
    for share in given.estimator.shares("m", device):
        is_able = segments.serving_all(wanted, device, share) is not None
        assert PooledSegments(replace(given)).can_serve_all(wanted, device, share) == is_able
