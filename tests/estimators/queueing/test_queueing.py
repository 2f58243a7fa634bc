"""Queueing of replicas and pools against request-by-request simulations, known formulas and invariants."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.brute_force import simulate, truth
from bench.queueing import configurations
from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    BatchPoissonArrivals,
    GammaArrivals,
    RecordedArrivals,
    scale_to_rate,
)
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing import batch_chain, replica
from gpuprof.estimators.queueing.batch_chain import backlog_law, lattice_law, service_of, toeplitz
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.estimators.queueing.replica import drop_unused_batches
from tests.estimators.queueing.pool_reference import play_pool

QUEUE = BatchQueue()


def _server(batch: int, wait: float, cv: float = 0.0, processes: int = 1, fixed: float = 0.3) -> BatchServer:
    latency = tuple(10.0 * (fixed + (1.0 - fixed) * n / batch) for n in range(1, batch + 1))
    return BatchServer(latency, batch, wait * 10.0, processes, cv)


def _at_load(server: BatchServer, load: float, scv: float = 1.0) -> Arrivals:
    return Arrivals(load * server.capacity_rps, scv)


def _agrees(server: BatchServer, arrivals: Arrivals, requests: int = 60_000) -> None:
    truth = simulate(arrivals, server, requests, seed=7)
    sojourn = QUEUE.sojourn(arrivals, server)
    assert sojourn.mean_ms == pytest.approx(truth.mean(), rel=0.03)
    assert sojourn.percentile(99) == pytest.approx(np.percentile(truth, 99), rel=0.05)
    assert sojourn.percentile(50) == pytest.approx(np.percentile(truth, 50), rel=0.04)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("wait", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_one_process_agrees_with_brute_force(batch: int, wait: float, load: float) -> None:
    server = _server(batch, wait, cv=0.2 if batch != 4 else 0.0)
    _agrees(server, _at_load(server, load), 30_000 if load < 0.6 else 120_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "wait", "cv"), [(1, 0.0, 0.0), (4, 0.3, 0.0), (8, 0.0, 0.1), (16, 1.0, 0.1), (32, 0.3, 0.0)]
)
def test_one_process_agrees_with_brute_force_at_nine_tenths_of_capacity(batch: int, wait: float, cv: float) -> None:
    server = _server(batch, wait, cv)
    _agrees(server, _at_load(server, 0.9), 1_500_000)


_RANDOM = list(configurations(25, seed=11))


@pytest.mark.parametrize(("arrivals", "server"), _RANDOM, ids=map(str, range(len(_RANDOM))))
def test_any_replica_agrees_with_brute_force(arrivals: Arrivals, server: BatchServer) -> None:
    reference = truth(arrivals, server, 300_000, seed=5, error=0.008, most=5_000_000)
    sojourn = QUEUE.sojourn(arrivals, server)
    assert max(reference.mean_error, reference.p99_error) < 0.01
    assert sojourn.mean_ms == pytest.approx(reference.mean, rel=0.03)
    assert sojourn.percentile(99) == pytest.approx(reference.p99, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "batch", "scv"), [(4, 2, 1.0), (8, 8, 1.0), (2, 32, 1.0), (4, 8, 3.0)])
def test_several_processes_agree_with_brute_force_at_high_load(processes: int, batch: int, scv: float) -> None:
    server = _server(batch, 0.3, cv=0.2, processes=processes)
    arrivals = _at_load(server, 0.9, scv)
    reference = truth(arrivals, server, 2_000_000, seed=5, error=0.01, most=16_000_000)
    sojourn = QUEUE.sojourn(arrivals, server)
    assert sojourn.mean_ms == pytest.approx(reference.mean, rel=0.03)
    assert sojourn.percentile(99) == pytest.approx(reference.p99, rel=0.05)


def test_close_to_capacity_the_simulated_law_is_the_solved_one() -> None:
    server = _server(4, 0.5, cv=0.1)
    for load in (0.95, 0.99):
        solved = QUEUE.sojourn(_at_load(server, load), server)
        simulated = QUEUE.sojourn(_at_load(server, load, 1.002), server)
        assert simulated.mean_ms == pytest.approx(solved.mean_ms, rel=0.02)
        assert simulated.percentile(99) == pytest.approx(solved.percentile(99), rel=0.02)


def test_flat_arrivals_that_meet_a_free_process_never_queue() -> None:
    server = BatchServer((10.0,), 1, 0.0, processes=2)
    sojourn = QUEUE.sojourn(_at_load(server, 0.8, 0.0), server)
    assert sojourn.percentile(1) == pytest.approx(10.0) and sojourn.percentile(99.9) == pytest.approx(10.0)


def test_the_backlog_of_single_exponential_services_is_known() -> None:
    law = backlog_law(0.9, 1.0, 1, 1.0, 1.0)
    assert law is not None
    within = np.array([0.5, 0.9, 0.99])
    # M/M/1: P(W > w) = 0.9 exp(-0.1 w)
    assert law.quantile(within) == pytest.approx(10.0 * np.log(0.9 / (1.0 - within)), rel=0.003)


@pytest.mark.parametrize("scv", [0.0, 0.3])
def test_gaps_beyond_the_lattice_take_no_more_memory_than_the_lattice(scv: float) -> None:
    law = lattice_law(1e6, scv, 1.0)
    assert len(law) < 50_000 and law[-2:].sum() > 0.9


@pytest.mark.parametrize("cv", [3.0, 10.0])
def test_times_that_vary_much_take_memory_in_proportion_to_their_lattice(cv: float) -> None:
    service, sizes = service_of(np.array([1.0, 1.5, 2.0]), cv), list[int]()

    def record(values: NDArray[Any], rows: int, columns: int, offset: int) -> NDArray[Any]:
        sizes.append(rows * columns)
        return toeplitz(values, rows, columns, offset)

    with mock.patch.object(batch_chain, "toeplitz", record):
        law = batch_chain.solve_chain(0.5, service)
    assert max(sizes) < 1_000 * len(law.lattice_mass)
    assert law.fresh.sum() + law.lattice_mass.sum() == pytest.approx(1.0)


def test_the_tail_beyond_the_lattice_is_the_sum_over_its_columns() -> None:
    law, cells, ratio = lattice_law(1.0, 4.0, 1.0 / 32.0), 96, 0.97
    rows = cells + len(law)
    columns = toeplitz(law, rows, rows, 0)
    beyond = columns[:, cells:] @ ratio ** np.arange(1, rows - cells + 1)
    folded = batch_chain._transition_probabilities(law, cells, ratio)
    np.testing.assert_allclose(folded[:, -1], columns[:, cells - 1] + beyond, atol=1e-15)


def test_a_wait_of_next_to_nothing_is_none() -> None:
    none, tiny = _server(4, 0.0), _server(4, 5e-324)
    assert QUEUE.sojourn(_at_load(none, 0.5), none) == QUEUE.sojourn(_at_load(tiny, 0.5), tiny)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("cv", [0.0, 0.5])
def test_single_requests_wait_as_pollaczek_and_khinchine_say(load: float, cv: float) -> None:
    server = BatchServer((8.0,), 1, 0.0, latency_cv=cv)
    sojourn = QUEUE.sojourn(_at_load(server, load), server)
    assert sojourn.mean_ms == pytest.approx(8.0 + 8.0 * load * (1.0 + cv**2) / (2.0 * (1.0 - load)), rel=0.01)
    assert sojourn.utilization == pytest.approx(load, rel=1e-3)


def test_a_request_that_meets_nobody_waits_for_the_timer() -> None:
    server = _server(8, 2.0)
    sojourn = QUEUE.sojourn(Arrivals(0.001), server)
    assert sojourn.percentile(50) == pytest.approx(20.0 + server.latency_ms[0], rel=1e-3)
    assert sojourn.mean_batch == pytest.approx(1.0, abs=1e-3)


def test_the_overhead_is_added_to_every_request() -> None:
    plain, slow = _server(2, 0.5), BatchServer(_server(2, 0.5).latency_ms, 2, 5.0, overhead_ms=3.0)
    arrivals = _at_load(plain, 0.5)
    assert QUEUE.sojourn(arrivals, slow).percentile(99) == pytest.approx(
        QUEUE.sojourn(arrivals, plain).percentile(99) + 3
    )


def test_at_capacity_every_time_is_infinite() -> None:
    server = _server(4, 0.0)
    sojourn = QUEUE.sojourn(_at_load(server, 1.0), server)
    assert math.isinf(sojourn.percentile(50)) and math.isinf(sojourn.mean_ms)
    assert sojourn.utilization >= 1.0
    assert sojourn.fraction_within(1e9) == 0.0


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 12),
    wait=st.floats(0.0, 4.0),
    cv=st.floats(0.0, 0.6),
    load=st.floats(0.01, 0.98),
    fixed=st.floats(0.0, 1.0),
)
def test_a_law_is_a_law_and_obeys_little(batch: int, wait: float, cv: float, load: float, fixed: float) -> None:
    server = _server(batch, wait, cv, fixed=fixed)
    arrivals = _at_load(server, load)
    sojourn = QUEUE.sojourn(arrivals, server)
    probabilities = [p for p, _ in sojourn.quantiles_ms]
    times = [t for _, t in sojourn.quantiles_ms]
    assert probabilities[0] == 0.0 and probabilities[-1] >= 0.9999
    assert all(a <= b for a, b in itertools.pairwise(probabilities))
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert 1.0 <= sojourn.mean_batch <= batch + 1e-9
    by_table = float(np.sum(np.diff(probabilities) * (np.array(times[1:]) + times[:-1]) / 2.0))
    assert by_table == pytest.approx(sojourn.mean_ms, rel=0.03)
    # Busy time by its definition: batches a second times their mean service, which is at least the shortest's.
    assert sojourn.utilization >= arrivals.rate_rps / 1000.0 / sojourn.mean_batch * server.latency_ms[0] * (1 - 1e-3)


def test_the_same_replica_on_a_faster_device_is_the_same_law_on_another_clock() -> None:
    slow, fast = _server(4, 0.5), BatchServer(tuple(t / 10 for t in _server(4, 0.5).latency_ms), 4, 0.5)
    at_slow = QUEUE.sojourn(_at_load(slow, 0.6), slow).percentile(99)
    assert QUEUE.sojourn(_at_load(fast, 0.6), fast).percentile(99) == pytest.approx(at_slow / 10.0)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("batch", "processes"), [(16, 3), (256, 1), (256, 3)])
def test_a_coarse_tail_is_within_a_fifth_of_the_fine_one(batch: int, processes: int, load: float) -> None:
    server = BatchServer(tuple(1.0 + 0.1 * n for n in range(1, batch + 1)), batch, 0.0, processes, 0.05, pause_cv=0.1)
    arrivals = Arrivals(load * server.capacity_rps)
    fine = BatchQueue().sojourn(arrivals, server).percentile(99.0)
    coarse = BatchQueue().pool(arrivals, (server,), coarse=True).whole.percentile(99.0)
    assert coarse != fine
    assert coarse == pytest.approx(fine, rel=0.2)


@pytest.mark.parametrize("latency_ms", [(5000.0, 10.0), (5.0, 250.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)])
def test_a_batch_that_takes_longer_than_a_full_one_keeps_the_process_busy(latency_ms: tuple[float, ...]) -> None:
    server = BatchServer(latency_ms, len(latency_ms), 0.0)
    law = BatchQueue().sojourn(Arrivals(0.9 * server.capacity_rps), server)
    assert law.utilization == pytest.approx(1.0, abs=0.01)
    assert law.percentile(50.0) > 0.3 * max(latency_ms)
    # Nearly all come while a slow batch runs; the full ones that then follow are quick.
    assert 0.9 * max(latency_ms) <= law.percentile(99.0) < 1.1 * max(latency_ms)


def _long_server(batch: int, cv: float = 0.0, pause: float = 1.0) -> BatchServer:
    return BatchServer(tuple(2.0 + 0.1 * n for n in range(1, batch + 1)), batch, 0.0, 1, cv, pause)


@pytest.mark.parametrize("cv", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("pause", [1.0, 1.3])
def test_a_lightly_loaded_replica_has_the_queue_of_its_small_batches(cv: float, pause: float) -> None:
    server, arrivals = _long_server(128, cv, pause), Arrivals(300.0)
    assert drop_unused_batches(arrivals.rate_rps, server).batch < 60
    sojourn = BatchQueue().sojourn(arrivals, server)
    with mock.patch.object(replica, "drop_unused_batches", lambda rate_rps, server: server):
        whole = BatchQueue().sojourn(arrivals, server)
    for percent in (50.0, 90.0, 99.0, 99.9):
        assert sojourn.percentile(percent) == pytest.approx(whole.percentile(percent), rel=5e-3)
    assert sojourn.mean_ms == pytest.approx(whole.mean_ms, rel=1e-4)
    assert sojourn.utilization == pytest.approx(whole.utilization, rel=1e-3)


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
@pytest.mark.parametrize("shape", [GammaArrivals(1.0, 4.0), BatchPoissonArrivals(1.0, 6)])
def test_a_pool_takes_arrivals_of_any_shape(shape: ArrivalProcess) -> None:
    servers, load = (server(4),) * 3, 0.7
    rate = load * capacity_rps(servers)
    times = scale_to_rate(shape, rate).stream(np.random.default_rng(5)).take(80_000) / 1e6
    spent = play_pool(times, servers, 6)[0][4_000:]
    pool = QUEUE.pool(Arrivals.from_process(shape, rate), servers).whole
    assert pool.percentile(99) == near_tail(spent)
    assert pool.percentile(50) == pytest.approx(np.percentile(spent, 50), rel=0.04)


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


def test_requests_that_take_hardly_any_time_have_a_law() -> None:
    # as measured of a model of microseconds on a busy machine
    server = BatchServer(
        (0.89299, 0.95419, 0.99165, 1.0), 4, 0.0, latency_cv=10.0022, pause_factor=4.9121, pause_cv=10.0022
    )
    assert 1.0 < QUEUE.sojourn(Arrivals(12.4944, 1.0), server).percentile(99) < math.inf


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
