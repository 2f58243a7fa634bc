"""Workers on few cores: models that take turns, and the work of the host beside them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.host_work import BUSY_RPS, CALM_RPS, HostWork
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, Sojourn, split_stream
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.rules.cpu_slices import plan_shared_slices
from gpuprof.rules.host_work import STAYS, disturb_at_worst, disturb_servers, lengthen_times
from gpuprof.rules.turns import LoadedReplica, add_waits, estimate_turn, find_cycle_ms, held_shares

ALONE_MS = {"a": 4.0, "b": 6.0, "c": 10.0, "d": 1.0}
SLOWS = {"a": 1.1, "b": 1.2, "c": 1.5, "d": 2.0}


class TurnQuestions:
    """Knows times alone and what each neighbour multiplies them by; remembers what it was asked."""

    def __init__(self) -> None:
        self.beside: list[tuple[str, ...]] = []

    def __call__(self, workload: Workload, beside: Sequence[Workload]) -> Estimate:
        assert not workload.turns and not any(neighbour.turns for neighbour in beside)
        self.beside.append(tuple(neighbour.model for neighbour in beside))
        time = ALONE_MS[workload.model] * math.prod(SLOWS[neighbour.model] for neighbour in beside)
        return Estimate(workload, "device", Figure(time, "measured", 0.9 * time, 1.1 * time), latency_cv=0.1)


def runs(model: str, turns: int = 0, share: float = 40.0) -> Workload:
    return Workload(model, 1, Share(share), turns=turns)


def test_those_who_take_turns_do_not_slow_one_another_and_others_slow_each_of_them() -> None:
    ask = TurnQuestions()
    estimate = estimate_turn(ask, runs("a", 1), [runs("b", 1), runs("d")])
    assert estimate.latency_ms.value == pytest.approx(2.0 * 4.0) and estimate.workload.turns == 1
    assert set(ask.beside) == {("d",)}


def test_of_others_who_take_turns_the_one_runs_that_slows_most() -> None:
    beside = [runs("c", 2, 60.0), runs("b", 2, 60.0)]
    assert estimate_turn(TurnQuestions(), runs("a"), beside).latency_ms.value == pytest.approx(1.5 * 4.0)
    assert estimate_turn(TurnQuestions(), runs("a"), beside[::-1]).latency_ms.value == pytest.approx(1.5 * 4.0)


def test_who_takes_turns_has_one_share_with_the_others_and_the_same_cores() -> None:
    shares = [(50.0, 1), (25.0, 0), (50.0, 1), (25.0, 0)]
    assert held_shares(shares) == [50.0, 25.0, 25.0]
    first, second, third, fourth = plan_shared_slices(shares, range(4))
    assert first == third and len(first.cores) == 2
    assert len({first.cores, second.cores, fourth.cores}) == 3


def load(times_ms: Sequence[float], rate_rps: float, turns: int = 1, cv: float = 0.0) -> LoadedReplica:
    return LoadedReplica(BatchServer(tuple(times_ms), len(times_ms), 0.0, latency_cv=cv), rate_rps, 100.0, turns)


def test_replicas_without_turns_or_mates_wait_for_nobody() -> None:
    alone = load([4.0], 50.0, turns=0), load([10.0], 10.0, turns=0), load([3.0, 4.0], 100.0, turns=2)
    assert [server.latency_ms for server in add_waits(alone)] == [(4.0,), (10.0,), (3.0, 4.0)]


def test_one_mate_is_waited_for_by_the_rest_of_its_batch() -> None:
    first, _ = add_waits([load([4.0], 1e-6), load([10.0], 20.0)])
    # It runs for 20% of the time, and 5 ms are left on average.
    assert first.pause_factor * first.latency_ms[0] - 4.0 == pytest.approx(0.2 * 10.0 / 2.0, rel=0.01)


def test_a_worker_with_more_work_than_time_has_the_longest_waits_and_serves_one_of_its_models_too_little() -> None:
    loaded = [load([10.0, 12.0], 90.0), load([6.0], 100.0), load([1.0], 5.0)]
    servers = add_waits(loaded)
    assert [server.latency_ms[-1] for server in servers] == pytest.approx([19.0] * 3)
    assert any(replica.rate_rps >= server.capacity_rps for replica, server in zip(loaded, servers, strict=True))


#: 99th percentiles in milliseconds of 300 s of a worker of each kind, simulated event by event.
SIMULATED = [
    pytest.param([([1.5, 1.9, 2.3, 2.7], 45.0, 0.0)] * 12, {0: 15.8}, id="alike at 81%"),
    pytest.param([([1.5, 1.9, 2.3, 2.7], 10.0, 0.0)] * 30, {0: 6.1}, id="many light"),
    pytest.param([([1.0], 20.0, 0.0)] * 41, {0: 14.3}, id="many without batches"),
    pytest.param([([8.48], 20.0, 0.0)] * 4, {0: 68.0}, id="few without batches"),
    pytest.param([([10.0, 15.0], 20.0, 0.0), ([4.0], 60.0, 0.0)], {0: 27.7}, id="a pair"),
    pytest.param(
        [([5.0, 8.0, 11.0, 14.0], 20.0, 0.2), ([20.0, 35.0], 5.0, 0.1), ([3.0], 30.0, 0.0), ([8.0], 10.0, 0.0)],
        {0: 30.0, 1: 53.0, 3: 34.0},
        id="unlike",
    ),
]


@pytest.mark.parametrize(("models", "p99_ms"), SIMULATED)
def test_waits_as_simulated(models: Sequence[tuple[Sequence[float], float, float]], p99_ms: dict[int, float]) -> None:
    loaded = [load(times, rate, cv=cv) for times, rate, cv in models]
    servers = add_waits(loaded)
    for position, simulated in p99_ms.items():
        sojourn = BatchQueue().sojourn(Arrivals(loaded[position].rate_rps), servers[position])
        assert sojourn.percentile(99.0) == pytest.approx(simulated, rel=0.15)


#: As above, of batches that run at once.
SHARED = [
    pytest.param([([1.5, 1.9, 2.3, 2.7], 45.0, 0.0)] * 12, {0: 20.3}, id="alike at 81%"),
    pytest.param([([1.5, 1.9, 2.3, 2.7], 10.0, 0.0)] * 30, {0: 8.4}, id="many light"),
    pytest.param([([1.0], 20.0, 0.0)] * 41, {0: 20.7}, id="many without batches"),
    pytest.param([([8.48], 20.0, 0.0)] * 4, {0: 80.0}, id="few without batches"),
    pytest.param([([10.0, 15.0], 20.0, 0.0), ([4.0], 60.0, 0.0)], {0: 36.9, 1: 19.7}, id="a pair"),
    pytest.param(
        [([5.0, 8.0, 11.0, 14.0], 20.0, 0.2), ([20.0, 35.0], 5.0, 0.1), ([3.0], 30.0, 0.0), ([8.0], 10.0, 0.0)],
        {0: 23.3, 1: 69.9, 2: 13.4, 3: 32.4},
        id="unlike",
    ),
]


@pytest.mark.parametrize(("models", "p99_ms"), SHARED)
def test_time_slices_as_simulated(
    models: Sequence[tuple[Sequence[float], float, float]], p99_ms: dict[int, float]
) -> None:
    loaded = [replace(load(times, rate, cv=cv), time_slice_ms=0.01) for times, rate, cv in models]
    servers = add_waits(loaded)
    for position, simulated in p99_ms.items():
        sojourn = BatchQueue().sojourn(Arrivals(loaded[position].rate_rps), servers[position])
        assert 0.9 * simulated <= sojourn.percentile(99.0) <= 1.55 * simulated


def test_beside_many_models_time_slices_are_a_processor_sharing_queue() -> None:
    """The mean is S / (1 - load), the variance that of Coffman, Muntz and Trotter 1970 for exponential times."""
    work, short, long = 0.6, 0.1, 20.0
    many = [replace(load([1.0], 1000.0 * work / 2000), time_slice_ms=0.01)] * 2000
    for own in (short, long):
        server, *_ = add_waits([replace(load([own], 1e-6), time_slice_ms=0.01), *many])
        mean_ms = server.pause_factor * server.latency_ms[0]
        assert mean_ms == pytest.approx(own / (1.0 - work), rel=0.01)
        decay = 1.0 - math.exp(-(1.0 - work) * own)
        variance = 2.0 * work * own / (1.0 - work) ** 3 - 2.0 * work / (1.0 - work) ** 4 * decay
        assert server.latency_cv * mean_ms == pytest.approx(math.sqrt(variance), rel=0.02)


def test_time_slices_of_more_work_than_time_are_those_beside_all_other_models() -> None:
    loaded = [replace(replica, time_slice_ms=0.01) for replica in (load([10.0], 90.0), load([6.0], 100.0))]
    assert [server.latency_ms[-1] for server in add_waits(loaded)] == pytest.approx([20.0, 12.0])


def test_the_longest_cycle_has_a_batch_of_each_model_or_a_slice_of_each_before_each_slice() -> None:
    assert find_cycle_ms(2.0, [10.0, 5.0], None) == 17.0
    assert find_cycle_ms(2.0, [10.0, 0.5], 1.0) == 2.0 + 2.0 + 1.0
    assert find_cycle_ms(0.2, [10.0, 0.5], 1.0) == 0.2 + 1.0 + 0.5


class Linear:
    """Busy for the part of the time that its requests take one by one."""

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        busy = arrivals.rate_rps * server.latency_ms[0] / 1000.0
        return Sojourn(busy, 1.0, 1.0, ((0.0, 1.0), (1.0, 1.0)))

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        return split_stream(self, arrivals, servers)


WORK = HostWork(handover_ms=0.2, host_ms=1.0, host_cores=2)
SERVER = BatchServer((10.0,), 1, 0.0, latency_cv=0.1, pause_cv=0.2)


def part(last: float, cores: float = 0.5) -> float:
    """What a replica bears that is so often the last to begin and has so much of the cores."""
    return STAYS * last + (1.0 - STAYS) * cores


def test_a_replica_loses_its_cores_part_of_the_work_while_all_others_run() -> None:
    # 40 requests/s of 1 ms take 4% of a core's time. The second replica runs 40% of the time; its batches begin at
    # 60 of 100 of the rate at which those of the first, were there any, would, who so are the last in 5 of 8 cases.
    first, second = disturb_servers(
        HostWork(host_ms=1.0, host_cores=2),
        [LoadedReplica(SERVER, 0.0, 50.0), LoadedReplica(SERVER, 40.0, 50.0)],
        Linear(),
    )
    assert first.latency_ms[0] == pytest.approx(10.0 / (1.0 - 0.04 * 0.4 * part(5 / 8)))
    assert second == SERVER  # the first never runs, so that there is an idle core whenever the second does


def test_a_time_sliced_worker_loses_the_time_of_one_of_its_cores() -> None:
    by_turns = LoadedReplica(SERVER, 30.0, 100.0, 1)
    lost = [
        1.0 - SERVER.latency_ms[0] / server.latency_ms[0]
        for replica in (by_turns, replace(by_turns, time_slice_ms=2.0))
        for server in disturb_servers(HostWork(host_ms=1.0, host_cores=2), [replica], Linear())
    ]
    assert lost == pytest.approx([0.03, 0.015])


def test_a_core_to_spare_takes_it_all() -> None:
    busy = [LoadedReplica(SERVER, 95.0, 25.0)] * 3
    assert disturb_servers(replace(WORK, host_cores=4), busy, Linear()) == (SERVER,) * 3
    full = disturb_servers(replace(WORK, host_cores=4), [*busy, LoadedReplica(SERVER, 95.0, 25.0)], Linear())
    assert full[0].latency_ms[0] > 10.0


def test_short_batches_bear_what_long_ones_beside_them_are_spared() -> None:
    long = BatchServer((100.0,), 1, 0.0)
    short, spared = disturb_servers(WORK, [LoadedReplica(SERVER, 60.0, 50.0), LoadedReplica(long, 6.0, 50.0)], Linear())
    lost = [1.0 - calm / server.latency_ms[0] for calm, server in ((10.0, short), (100.0, spared))]
    assert lost[0] / lost[1] == pytest.approx(part(10 / 11) / part(1 / 11), rel=0.1)
    assert sum(lost) == pytest.approx(0.001 * 66.0 * 0.6, rel=0.1)  # 66 requests/s of 1 ms, while the other runs


def test_what_is_disturbed_at_random_varies_more() -> None:
    longer = lengthen_times(SERVER, 0.1, 0.5)
    time = 10.0 / 0.9
    assert longer.latency_ms == pytest.approx((time,))
    # a compound Poisson sum of 0.1 · time / 0.5 pieces of 0.5 has the variance 0.1 · time · 0.5
    assert longer.latency_cv == pytest.approx(math.sqrt(0.1**2 + 0.1 * time * 0.5 / time**2))
    assert longer.pause_cv == pytest.approx(math.sqrt(0.2**2 + 0.1 * time * 0.5 / time**2))


def test_no_placement_disturbs_more_than_the_worst() -> None:
    for rate in (5.0, 50.0, 95.0):
        disturbed = disturb_servers(
            WORK, [LoadedReplica(SERVER, rate, 50.0), LoadedReplica(SERVER, 60.0, 50.0)], Linear()
        )
        assert disturbed[0].latency_ms[0] <= disturb_at_worst(WORK, SERVER, rate + 60.0).latency_ms[0]
    assert math.isfinite(disturb_at_worst(WORK, SERVER, 1e9).latency_ms[0])


def test_where_nothing_is_known_nothing_changes() -> None:
    for work in (HostWork(0.2), HostWork(host_ms=1.0), HostWork(host_cores=2)):
        assert disturb_servers(work, [LoadedReplica(SERVER, 50.0, 100.0)], Linear()) == (SERVER,)
        assert disturb_at_worst(work, SERVER, 1e6) == SERVER


def test_the_more_requests_come_the_less_each_takes() -> None:
    work = HostWork(0.1, 0.5, 2, 0.3)
    costs = [work.at(rate).host_ms for rate in (1.0, CALM_RPS, 200.0, BUSY_RPS, 1e6)]
    assert costs == pytest.approx([0.5, 0.5, 0.5 - 0.2 * math.log(200 / 60) / math.log(10), 0.3, 0.3])
    assert work.at(200.0).at(1e6) == work.at(200.0)
    assert HostWork(0.1, 0.5, 2).at(1e6).host_ms == 0.5
    assert HostWork(0.1, 0.5, 2, 0.7).at(1e6).host_ms == 0.5  # measured while something else ran
