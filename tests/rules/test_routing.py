from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError
from gpuprof.rules.routing import FastestFirst, ReplicaLoad, RoundRobin, expected_finish_ms, is_hopeless, routing_rule


def load(
    waiting: int = 0, busy: tuple[float, ...] = (0.0,), latency: tuple[float, ...] = (10.0,), **more: float
) -> ReplicaLoad:
    return ReplicaLoad(waiting, more.get("oldest", 0.0), busy, latency, more.get("max_wait", 0.0))


def test_an_idle_replica_answers_after_the_time_of_one_request() -> None:
    assert expected_finish_ms(load(latency=(4.0, 6.0))) == 4.0


def test_full_batches_ahead_are_spread_over_the_processes() -> None:
    assert expected_finish_ms(load(waiting=4, busy=(0.0, 0.0), latency=(10.0, 12.0))) == 12.0 + 10.0
    assert expected_finish_ms(load(waiting=4, busy=(0.0,), latency=(10.0, 12.0))) == 24.0 + 10.0


def test_a_busy_process_is_waited_for() -> None:
    assert expected_finish_ms(load(busy=(7.0, 3.0))) == 13.0


def test_a_batch_that_can_still_fill_waits_as_long_as_it_may() -> None:
    assert expected_finish_ms(load(latency=(10.0, 12.0), max_wait=5.0)) == 15.0
    three = (10.0, 12.0, 14.0)
    assert expected_finish_ms(load(waiting=1, latency=three, max_wait=5.0, oldest=2.0)) == 3.0 + 12.0
    assert expected_finish_ms(load(waiting=1, latency=(10.0, 12.0), max_wait=5.0)) == 12.0  # it fills the batch


def test_a_replica_without_a_living_process_never_answers() -> None:
    assert expected_finish_ms(load(busy=())) == float("inf")


def test_the_fastest_is_chosen_and_equals_take_turns() -> None:
    rule = FastestFirst()
    assert rule.choose([load(waiting=3), load(waiting=1), load(waiting=2)]) == 1
    assert sorted(rule.choose([load(), load()]) for _ in range(4)) == [0, 0, 1, 1]


def test_round_robin_takes_turns_and_passes_over_the_dead() -> None:
    rule = RoundRobin()
    assert [rule.choose([load(waiting=9), load(), load(busy=())]) for _ in range(4)] == [0, 1, 0, 1]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.lists(st.floats(0, 100), min_size=1, max_size=3), st.integers(1, 8)),
        min_size=1,
        max_size=6,
    )
)
def test_the_choice_is_never_beaten_by_another_replica(replicas: list[tuple[int, list[float], int]]) -> None:
    loads = [load(waiting, tuple(busy), tuple(5.0 + i for i in range(batch))) for waiting, busy, batch in replicas]
    chosen = FastestFirst().choose(loads)
    assert expected_finish_ms(loads[chosen]) == min(map(expected_finish_ms, loads))


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 8))
def test_more_requests_ahead_never_make_the_answer_earlier_by_more_than_their_batch_saves(
    waiting: int, processes: int, batch: int
) -> None:
    latency = tuple(10.0 + i for i in range(batch))
    now = expected_finish_ms(load(waiting, (0.0,) * processes, latency))
    later = expected_finish_ms(load(waiting + batch, (0.0,) * processes, latency))
    assert later >= now


def test_only_what_would_be_late_is_hopeless() -> None:
    assert is_hopeless(finish_ms=30.0, waited_ms=5.0, deadline_ms=38.0)
    assert not is_hopeless(finish_ms=30.0, waited_ms=4.0, deadline_ms=38.0)


def test_an_unknown_rule_is_named_with_the_nearest() -> None:
    assert isinstance(routing_rule("round-robin"), RoundRobin)
    with pytest.raises(InputError, match="did you mean fastest"):
        routing_rule("fast")
