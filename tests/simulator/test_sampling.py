"""The sampling approximation."""

from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    DeterministicArrivals,
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    RecordedArrivals,
)
from gpuprof.errors import InputError
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.failures import Failure
from gpuprof.simulator.sampling import Sampling, sample_replicas, simulate_sampled, slot_process, slot_rate
from tests.simulator.maps import make_map, replica


def test_a_shrunken_map_keeps_every_kind_of_replica_and_says_how_much_is_left() -> None:
    kinds = [[replica("a", [5.0])]] * 30 + [[replica("a", [10.0], processes=2)]] * 10 + [[replica("b", [2.0])]]
    small, kept = sample_replicas(make_map(kinds), 8)
    models = [r.model for _, _, _, r in small.places()]
    assert models.count("a") == 8
    assert models.count("b") == 1
    assert sum(r.processes == 2 for _, _, _, r in small.places()) == 2
    assert kept == pytest.approx({"a": 8 / 40, "b": 1.0})


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (GammaArrivals(7.0), 7.0),
        (RecordedArrivals(np.array([0, 1, 2, 15]) * 1_000_000_000, 20.0), 0.3),
        (DiurnalArrivals(10.0, 3.0, 20.0), 10.0),
    ],
)
def test_the_rate_of_a_slot_is_the_mean_in_it(process: ArrivalProcess, expected: float) -> None:
    assert slot_rate(process, 0.0, 10.0) == pytest.approx(expected)


def test_a_sample_comes_close_to_the_whole() -> None:
    deployment = make_map([[replica("m", [5.0, 5.5, 6.0, 6.5], max_wait_ms=2.0, cv=0.1)]] * 40, slo_ms=15.0)
    arrivals: dict[str, ArrivalProcess] = {"m": DiurnalArrivals(40 * 350.0, 3.0, 60.0)}
    options = SimulationOptions(60.0)
    whole = simulate(deployment, arrivals, options).models[0]
    sampled = simulate_sampled(deployment, arrivals, options, Sampling(16, 20, 1.0, 0.2)).models[0]
    assert sampled.requests == pytest.approx(whole.requests, rel=0.02)
    assert sampled.goodput_rps == pytest.approx(whole.goodput_rps, rel=0.02)
    assert sampled.p50_ms == pytest.approx(whole.p50_ms, rel=0.05)
    assert sampled.p99_ms == pytest.approx(whole.p99_ms, rel=0.10)


def test_work_that_is_left_over_delays_the_slots_after() -> None:
    deployment = make_map([[replica("m", [10.0])]], slo_ms=100.0)
    busy_then_quiet = np.concatenate([np.linspace(0, 10e9, 2001)[:-1], np.linspace(10e9, 20e9, 501)[:-1]])
    arrivals: dict[str, ArrivalProcess] = {"m": RecordedArrivals(busy_then_quiet.astype(np.int64), 20.0)}
    options = SimulationOptions(20.0, refuse_hopeless=False)
    whole = simulate(deployment, arrivals, options).models[0]
    sampled = simulate_sampled(deployment, arrivals, options, Sampling(4, 4, 1.0, 0.5)).models[0]
    # 1000 requests too many in the first half, of which the second can do 500: nothing is in time, and half the
    # requests of the whole wait 7 s and more.
    assert whole.in_time == pytest.approx(0, abs=20)
    assert sampled.in_time == pytest.approx(0, abs=20)
    assert sampled.p50_ms == pytest.approx(whole.p50_ms, rel=0.25)


def test_what_cannot_be_sampled_is_refused() -> None:
    deployment = make_map([[replica("m", [10.0])]])
    with pytest.raises(InputError, match="failures cannot be sampled"):
        options = SimulationOptions(1000.0, failures=(Failure("node0", None, 1.0),))
        simulate_sampled(deployment, {"m": DeterministicArrivals(1.0)}, options, Sampling())
    with pytest.raises(InputError, match="10 s are too short to sample"):
        simulate_sampled(deployment, {"m": DeterministicArrivals(1.0)}, SimulationOptions(10.0), Sampling())
    with pytest.raises(InputError, match="the map has no model 'x'"):
        simulate_sampled(deployment, {"x": DeterministicArrivals(1.0)}, SimulationOptions(1000.0), Sampling())


def test_bursts_begin_in_slots_as_often_as_they_last() -> None:
    bursts = MmppArrivals(100.0, ratio=4.0, burst_s=2.0, calm_s=8.0)
    starts = [slot_process(bursts, 10.0, turn) for turn in range(50)]
    assert all(isinstance(start, MmppArrivals) and start.rate_rps == 10.0 for start in starts)
    begins = [start.start[0] for start in starts if isinstance(start, MmppArrivals) and start.start is not None]
    assert sum(10.0 * begin < 2.0 for begin in begins) == pytest.approx(10, abs=1)


def test_a_burst_that_was_begun_lasts_as_long_as_it_was_told() -> None:
    # The median of a stay of 2 s is 1.386 s; the calm after it has next to no requests.
    process = MmppArrivals(1000.0, ratio=1e6, burst_s=2.0, calm_s=2.0, start=(0.1, 0.5))
    times = process.stream(np.random.Generator(np.random.PCG64(1))).take(1000) / 1e9
    assert times[-1] < 1.386
    later = process.stream(np.random.Generator(np.random.PCG64(1))).take(3000) / 1e9
    assert np.count_nonzero((later > 1.386) & (later < 1.40)) == 0
    assert np.count_nonzero(later < 1.386) == pytest.approx(2772, rel=0.06)
