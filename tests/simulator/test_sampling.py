"""The sampling approximation."""

from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals, DiurnalArrivals, RecordedArrivals
from gpuprof.errors import InputError
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.failures import Failure
from gpuprof.simulator.sampling import sample_replicas, simulate_sampled
from tests.simulator.maps import make_map, replica


def test_a_shrunken_map_keeps_every_kind_of_replica_and_says_how_much_is_left() -> None:
    kinds = [[replica("a", [5.0])]] * 30 + [[replica("a", [10.0], processes=2)]] * 10 + [[replica("b", [2.0])]]
    small, kept = sample_replicas(make_map(kinds), 8)
    models = [r.model for _, _, _, r in small.places()]
    assert models.count("a") == 8
    assert models.count("b") == 1
    assert sum(r.processes == 2 for _, _, _, r in small.places()) == 2
    assert kept == pytest.approx({"a": 8 / 40, "b": 1.0})


@pytest.mark.parametrize("recorded", [False, True])
def test_a_sample_comes_close_to_the_whole(recorded: bool) -> None:
    deployment = make_map([[replica("m", [5.0, 5.5, 6.0, 6.5], max_wait_ms=2.0, cv=0.1)]] * 40, slo_ms=15.0)
    process: ArrivalProcess = DiurnalArrivals(40 * 350.0, 3.0, 20.0)
    if recorded:
        times = process.stream(np.random.Generator(np.random.PCG64(5))).take(300_000)
        process = RecordedArrivals(times[times < 20e9], 20.0)
    options = SimulationOptions(20.0)
    whole = simulate(deployment, {"m": process}, options)
    sampled = simulate_sampled(deployment, {"m": process}, options)
    model, estimate = whole.models[0], sampled.models[0]
    assert sampled.method == "sampled"
    assert len(sampled.replicas) == 16
    assert estimate.requests == pytest.approx(model.requests, rel=0.02)
    assert estimate.goodput_rps == pytest.approx(model.goodput_rps, rel=0.02)
    assert estimate.mean_ms == pytest.approx(model.mean_ms, rel=0.05)
    assert estimate.p99_ms == pytest.approx(model.p99_ms, rel=0.10)
    assert sum(sampled.series[0].arrived) == pytest.approx(model.requests, rel=0.02)
    assert sampled.replicas[0].throughput_rps == pytest.approx(whole.replicas[0].throughput_rps, rel=0.1)


def test_what_cannot_be_sampled_is_refused() -> None:
    deployment = make_map([[replica("m", [10.0])]])
    with pytest.raises(InputError, match="failures cannot be sampled"):
        options = SimulationOptions(1000.0, failures=(Failure("node0", None, 1.0),))
        simulate_sampled(deployment, {"m": DeterministicArrivals(1.0)}, options)
    with pytest.raises(InputError, match="the map has no model 'x'"):
        simulate_sampled(deployment, {"x": DeterministicArrivals(1.0)}, SimulationOptions(1000.0))
