"""Bursts and calm, and the law of what they leave undone, against a path that is drawn request by request."""

from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.arrival_process import Bursts, at_rate, peaks
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.burst_path import draw_path
from gpuprof.estimators.queueing.queueing import BatchQueue

SERVER = BatchServer((6.0, 8.0, 9.0, 10.0), 4, 0.0, latency_cv=0.1)


def play_fluid(process: Bursts, rate: float, capacity: float, cycles: int) -> tuple[float, np.ndarray]:
    """Return the part of the requests that come in bursts, and the backlogs, in ms, that requests find."""
    random = np.random.default_rng(2)
    mean = (process.ratio * process.burst_s + process.calm_s) / (process.burst_s + process.calm_s)
    backlog, found, in_bursts = 0.0, [], 0
    for _ in range(cycles):
        for seconds, intensity in ((process.calm_s, rate / mean), (process.burst_s, process.ratio * rate / mean)):
            stay = random.exponential(1000.0 * seconds)
            when = np.sort(random.uniform(0.0, stay, random.poisson(stay * intensity)))
            slope = intensity / capacity - 1.0
            found.append(np.maximum(0.0, backlog + slope * when))
            in_bursts += len(when) if intensity > rate else 0
            backlog = max(0.0, backlog + slope * stay)
    together = np.concatenate(found)
    return in_bursts / len(together), together


@pytest.mark.parametrize("peak", [1.5, 2.5])
def test_the_strata_have_the_masses_of_a_path_that_is_drawn(peak: float) -> None:
    process, rate, capacity = peaks(1.0, peak, 0.5), 0.28, 0.4
    path = draw_path(process, rate, 1.0, capacity, 400_000, np.random.default_rng(1))
    in_bursts, backlogs = play_fluid(process, rate, capacity, 6_000)
    masses = path.masses()
    assert masses.sum() == pytest.approx(1.0)
    assert path.burst_part == pytest.approx(in_bursts, rel=0.03)
    law = path.law()
    assert law is not None
    assert law.mass.sum() == pytest.approx(1.0)
    for part in (0.6, 0.9, 0.99):
        if np.quantile(backlogs, part) > 0.0:
            assert float(law.quantile(np.array(part))) == pytest.approx(np.quantile(backlogs, part), rel=0.1)
    arrived = path.draw_arrivals(400_000, np.random.default_rng(3))
    counts = np.bincount(path.stratum_at(arrived), minlength=len(masses)) / len(arrived)
    assert np.abs(counts - masses).max() < 0.02


def test_bursts_below_capacity_are_counted_by_phase_alone() -> None:
    path = draw_path(Bursts(1.0, 2.0, 1.0, 1.0), 0.2, 1.0, 0.4, 100_000, np.random.default_rng(1))
    assert path.law() is None
    assert path.masses() == pytest.approx([1 / 3, 2 / 3])


def test_requests_wait_as_much_longer_as_the_bursts_are_that_nobody_can_simulate() -> None:
    queue, servers, rate = BatchQueue(), (SERVER,) * 4, 0.7 * 4 * SERVER.capacity_rps
    short, long = (
        queue.pool(Arrivals.from_process(at_rate(peaks(1.0, 2.0, length_s), rate), rate), servers).whole
        for length_s in (20.0, 2_000.0)
    )
    assert long.percentile(99) == pytest.approx(100.0 * short.percentile(99), rel=0.05)
    assert long.percentile(5) == pytest.approx(short.percentile(5), rel=0.1)


def test_a_pool_under_bursts_is_as_slow_whatever_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprof.estimators.queueing import pool_simulation
    from gpuprof.estimators.queueing.pool_table import scale_server
    from gpuprof.estimators.queueing.scaled_server import PoolArrivals

    one = scale_server(SERVER, 10.0)
    stream = PoolArrivals(0.8 * 8 * one.capacity, 1.0, peaks(0.8 * 8 * SERVER.capacity_rps, 2.0, 0.5), 10.0)
    tails = []
    for seed in (1, 2, 3, 4):
        monkeypatch.setattr(pool_simulation, "_SEED", seed)
        tails.append(float(pool_simulation.simulate_pool(stream, [(one, 8)], np.array([0.99])).times[-1][0]))
    assert max(tails) < 1.1 * min(tails)
