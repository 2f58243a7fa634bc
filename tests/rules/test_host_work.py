from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, Sojourn, split_stream
from gpuprof.rules.host_work import (
    BUSY_RPS,
    CALM_RPS,
    STAYS,
    HostWork,
    disturb_at_worst,
    disturb_servers,
    lengthen_times,
)
from gpuprof.rules.turns import LoadedReplica


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
