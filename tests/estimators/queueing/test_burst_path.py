"""Bursts and calm, and the law of what they leave undone, against a path that is drawn request by request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gpuprof.domain.arrival_process import MmppArrivals, mmpp_with_peaks, scale_to_rate
from gpuprof.domain.arrival_text import parse_arrivals
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing import pool_kernel
from gpuprof.estimators.queueing.burst_backlog import BurstBacklog
from gpuprof.estimators.queueing.burst_path import draw_path
from gpuprof.estimators.queueing.queueing import BatchQueue
from tests.estimators.queueing.drawn_pools import compare_fluid, draw_group, fluid_wait_ms

SERVER = BatchServer((6.0, 8.0, 9.0, 10.0), 4, 0.0, latency_cv=0.1)


def play_requests(
    stays: tuple[float, float], rates: tuple[float, float], service: float, cycles: int
) -> tuple[Any, Any]:
    """Return the phases that requests of one server come in, one by one, and the work that each finds there."""
    random = np.random.default_rng(2)
    work, last, clock, phases, found = 0.0, 0.0, 0.0, [], []
    for phase, (stay, rate) in [pair for _ in range(cycles) for pair in enumerate(zip(stays, rates, strict=True))]:
        length = random.exponential(stay)
        for when in clock + np.sort(random.uniform(0.0, length, random.poisson(length * rate))):
            work = max(0.0, work - (when - last))
            phases.append(phase)
            found.append(work)
            work, last = work + service, when
        clock += length
    return np.array(phases), np.array(found)


@pytest.mark.parametrize(("calm_rate", "service"), [(0.35, 0.5), (1.0, 0.6), (2.0, 0.2)])
def test_the_law_of_the_backlog_is_that_of_a_queue_played_request_by_request(calm_rate: float, service: float) -> None:
    stays, rates = (60.0, 20.0), (calm_rate, 3.0 * calm_rate)
    law = BurstBacklog(stays, rates, service, 0.0)
    phases, found = play_requests(stays, rates, service, 6_000)
    assert law.parts == pytest.approx(np.bincount(phases) / len(phases), rel=0.03)
    levels = np.array([3.0 * service, *np.quantile(found[found > 3.0 * service], [0.3, 0.8])])
    above = law.beyond_exactly(levels)
    for phase in (0, 1):
        seen = [float((found[phases == phase] > level).mean()) for level in levels]
        assert above[phase] == pytest.approx(seen, rel=0.1, abs=1e-4)


def test_many_small_requests_are_a_brownian_motion() -> None:
    law = BurstBacklog((1_500.0, 500.0), (8.0, 24.0), 0.07, 0.5)
    levels = np.array([3.0, 30.0, 300.0])
    assert law.beyond(levels) == pytest.approx(law.beyond_exactly(levels), rel=0.02)


@pytest.mark.parametrize("peak", [1.5, 2.5])
def test_the_strata_have_the_masses_of_a_path_that_is_drawn(peak: float) -> None:
    process, rate, capacity = mmpp_with_peaks(1.0, peak, 0.5), 0.28, 0.4
    path = draw_path(process, rate, 1.0, capacity, 400_000, np.random.default_rng(1))
    masses = path.masses()
    assert masses.sum() == pytest.approx(1.0)
    assert path.law().mass.sum() == pytest.approx(1.0)
    arrived = path.draw_arrivals(400_000, np.random.default_rng(3))
    backlogs = np.empty(len(arrived))
    constant = np.ones(pool_kernel.ENTRIES)
    pool_kernel.find_backlogs(1, 1.0 / capacity, constant, np.zeros(1024), arrived, backlogs)
    counts = np.bincount(path.strata(arrived, backlogs), minlength=len(masses)) / len(arrived)
    assert np.abs(counts - masses).max() < 0.02
    assert (np.diff(path.levels()[::2]) > 0.0).all()


@pytest.mark.slow
def test_requests_wait_as_much_longer_as_the_bursts_are_that_nobody_can_simulate() -> None:
    queue, servers, rate = BatchQueue(), (SERVER,) * 4, 0.7 * 4 * SERVER.capacity_rps
    short, long = (
        queue.pool(Arrivals.from_process(scale_to_rate(mmpp_with_peaks(1.0, 2.0, length_s), rate), rate), servers).whole
        for length_s in (20.0, 2_000.0)
    )
    assert long.percentile(99) == pytest.approx(100.0 * short.percentile(99), rel=0.05)
    assert long.percentile(5) == pytest.approx(short.percentile(5), rel=0.1)


def test_a_pool_under_bursts_is_as_slow_whatever_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprof.estimators.queueing import pool_simulation
    from gpuprof.estimators.queueing.pool_table import scale_server
    from gpuprof.estimators.queueing.scaled_server import PoolArrivals

    one = scale_server(SERVER, 10.0)
    stream = PoolArrivals(0.8 * 8 * one.capacity, 1.0, mmpp_with_peaks(0.8 * 8 * SERVER.capacity_rps, 2.0, 0.5), 10.0)
    tails = []
    for seed in (1, 2, 3, 4):
        monkeypatch.setattr(pool_simulation, "_SEED", seed)
        tails.append(float(pool_simulation.simulate_pool(stream, [(one, 8)], np.array([0.99])).times[-1][0]))
    assert max(tails) < 1.02 * min(tails)  # 1.04 by the backlog of a fluid


def test_a_fluid_under_bursts_waits_as_long_as_cycle_after_cycle_comes_to() -> None:
    bursts, capacity_rps = MmppArrivals(800.0, 3.0, 0.5, 1.5), 1000.0
    random, rates, work, counted = np.random.default_rng(3), (400.0 * 4.0 / 3.0, 1600.0), 0.0, []
    stays = random.exponential((1.5, 0.5), (20_000, 2))
    for cycle in stays:
        for stay, rate_rps in zip(cycle, rates, strict=True):
            times = stay * random.random(math.ceil(rate_rps * stay / 20.0))
            counted.append(np.maximum(0.0, work + (rate_rps - capacity_rps) * times))
            work = max(0.0, work + (rate_rps - capacity_rps) * stay)
    found_ms = 1000.0 * float(np.quantile(np.concatenate(counted), 0.99)) / capacity_rps
    assert fluid_wait_ms(bursts, capacity_rps, 0.99) == pytest.approx(found_ms, rel=0.05)


@pytest.mark.parametrize("seed", [921003, 921033, 921042])
def test_a_pool_that_bursts_fill_waits_as_a_fluid_does(seed: int) -> None:
    """Sixteen million simulated requests are too few here: their p99 came out 26 to 56% too low."""
    servers, load = draw_group(seed)
    rate_rps = load * math.fsum(one.capacity_rps for one in servers)
    process = parse_arrivals("mmpp:2,0.5s", rate_rps)
    assert isinstance(process, MmppArrivals)
    found = BatchQueue().pool(Arrivals.from_process(process, rate_rps), servers).whole
    error = compare_fluid(servers, process, found.percentile(99.0))
    assert abs(error) < 0.03
