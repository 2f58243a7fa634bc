"""Replicas that take turns run one batch at a time, in the order in which their batches were formed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.deployment import Replica
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from tests.simulator.maps import at, make_map, replica


def group(own_ms: dict[str, float], turns: int = 1) -> list[Replica]:
    """Replicas of one worker, for batches of one."""
    return [
        replica(model, [turn_ms]).model_copy(update={"turns": turns, "sm_share_pct": 40.0})
        for model, turn_ms in own_ms.items()
    ]


def test_a_batch_waits_while_another_has_its_turn() -> None:
    result = simulate(make_map([group({"a": 10.0, "b": 4.0})]), {"a": at(0.0), "b": at(2.0)}, SimulationOptions(1.0))
    assert [model.mean_ms for model in result.models] == [10.0, 12.0]


def test_whoever_is_alone_waits_for_nobody() -> None:
    result = simulate(make_map([group({"a": 10.0, "b": 4.0})]), {"a": at(0.0, 20.0)}, SimulationOptions(1.0))
    assert result.models[0].mean_ms == 10.0


def test_groups_and_devices_take_their_turns_apart() -> None:
    gpus = [[*group({"a": 10.0, "b": 4.0}), *group({"c": 5.0, "d": 5.0}, 2)], group({"e": 3.0, "f": 3.0})]
    result = simulate(make_map(gpus), {model: at(0.0) for model in "abcdef"}, SimulationOptions(1.0))
    assert [model.mean_ms for model in result.models] == [10.0, 14.0, 5.0, 10.0, 3.0, 6.0]


@settings(max_examples=40, deadline=None)
@given(
    own=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    sent=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=60),
)
def test_as_a_queue_of_one_server_where_each_model_has_one_batch_at_a_time(
    own: list[int], sent: list[tuple[int, int]]
) -> None:
    names = [f"m{number}" for number in range(len(own))]
    # Apart by nanoseconds, so that no two events are at one instant.
    due = sorted(
        {
            (time * 1_000_000 + number * 1000 + model % len(own), model % len(own))
            for number, (model, time) in enumerate(sent)
        }
    )
    arrivals = {
        name: RecordedArrivals(np.array([time for time, model in due if model == number], np.int64), 1.0)
        for number, name in enumerate(names)
    }
    given_map = make_map([group(dict(zip(names, map(float, own), strict=True)))])
    result = simulate(given_map, arrivals, SimulationOptions(1.0, refuse_hopeless=False))
    for number, row in enumerate(result.models):
        expected = play(own, due, number)
        assert row.requests == len(expected)
        if expected:
            assert row.mean_ms == pytest.approx(sum(expected) / len(expected) * 1e-6, rel=1e-6)


def play(batch_ms: list[int], due: list[tuple[int, int]], which: int) -> list[int]:
    """Return the times of a model's requests: each model holds one request ready, the oldest ready one runs next."""
    waiting: dict[int, list[int]] = {
        number: [time for time, model in due if model == number] for number in range(len(batch_ms))
    }
    free_at = dict.fromkeys(waiting, 0)  # when a model's request before has been answered
    until, durations = 0, []
    while any(waiting.values()):
        ready, number = min((max(times[0], free_at[number]), number) for number, times in waiting.items() if times)
        until = max(until, ready) + batch_ms[number] * 1_000_000
        free_at[number] = until
        sent = waiting[number].pop(0)
        if number == which:
            durations.append(until - sent)
    return durations
