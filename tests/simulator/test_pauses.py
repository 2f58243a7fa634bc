"""Replicas that do not run for a while: what they have ends so much later, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.simulator.cluster import Pause, SimulationOptions
from gpuprof.simulator.engine import simulate
from tests.simulator.maps import make_map, replica


def at(*milliseconds: float) -> RecordedArrivals:
    return RecordedArrivals(np.array([round(t * 1e6) for t in milliseconds], np.int64), 1.0)


def mean_ms(arrivals: RecordedArrivals, *pauses_ms: tuple[float, float], processes: int = 1) -> float | None:
    pauses = tuple(Pause(begin / 1e3, lasts / 1e3, (0,)) for begin, lasts in pauses_ms)
    whole = make_map([[replica("m", [10.0], processes=processes)]])
    return simulate(whole, {"m": arrivals}, SimulationOptions(1.0, pauses=pauses)).models[0].mean_ms


@pytest.mark.parametrize(
    ("pause", "took_ms"),
    [
        ((2.0, 5.0), 15.0),  # in the middle of the batch
        ((0.1, 0.5), 10.5),  # shorter than a step
        ((9.5, 100.25), 110.25),
        ((10.5, 5.0), 10.0),  # after its end
        ((-20.0, 10.0), 10.0),  # before anything
    ],
)
def test_a_batch_goes_on_after_a_pause_where_it_was(pause: tuple[float, float], took_ms: float) -> None:
    assert mean_ms(at(0.0), pause) == pytest.approx(took_ms, abs=1e-6)


def test_a_batch_that_would_begin_in_a_pause_stands_still_for_the_rest_of_it() -> None:
    assert mean_ms(at(2.5), (0.0, 8.0)) == pytest.approx(15.5, abs=0.5)  # a step is a millisecond


def test_who_waits_behind_a_batch_waits_for_its_pause_too() -> None:
    assert mean_ms(at(0.0, 1.0), (2.0, 4.0)) == pytest.approx((14.0 + 23.0) / 2, abs=1e-6)


def test_all_processes_of_a_replica_stand_still_and_no_other_replica() -> None:
    assert mean_ms(at(0.0, 0.0), (2.0, 4.0), processes=2) == pytest.approx(14.0, abs=1e-6)
    whole = make_map([[replica("m", [10.0]), replica("n", [10.0])]])
    options = SimulationOptions(1.0, pauses=(Pause(0.002, 0.004, (1,)),))
    seen = simulate(whole, {"m": at(0.0), "n": at(0.0)}, options)
    assert [model.mean_ms for model in seen.models] == pytest.approx([10.0, 14.0], abs=1e-6)


def test_who_takes_turns_with_a_replica_that_stands_still_waits_for_it() -> None:
    parts = [
        replica(name, [20.0]).model_copy(update={"turns": 1, "turn_ms": 10.0, "sm_share_pct": 40.0}) for name in "mn"
    ]
    options = SimulationOptions(1.0, pauses=(Pause(0.002, 0.004, (0,)),))
    seen = simulate(make_map([parts]), {"m": at(0.0), "n": at(8.0)}, options)
    assert [model.mean_ms for model in seen.models] == pytest.approx([14.0, 16.0], abs=1e-6)
