from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.rules.batching import batch_size_now, needs_padding, wait_limit_ms
from gpuprof.rules.routing import (
    FastestFirst,
    ReplicaLoad,
    adapt_reserve,
    correct_expected_ms,
    decay_count,
    expect_rows,
    expected_finish_ms,
    extend_wait_ms,
    forecast_joining,
    is_refused,
    makes_oldest_late,
)


def load(
    waiting: int = 0, busy: tuple[float, ...] = (0.0,), latency: tuple[float, ...] = (10.0,), **more: float
) -> ReplicaLoad:
    joining = int(more.get("joining", 0))
    return ReplicaLoad(waiting, more.get("oldest", 0.0), busy, latency, more.get("max_wait", 0.0), joining=joining)


def test_requests_that_join_a_batch_do_not_raise_the_reserve() -> None:
    latency = (10.0, 11.0, 12.0, 13.0)
    first = load(busy=(5.0,), latency=latency, joining=2)
    told_ms, rows = expected_finish_ms(first), expect_rows(first.waiting, first.joining, 4)
    assert (told_ms, rows) == (16.0, 2)
    expected_ms = correct_expected_ms(told_ms, rows, 4, latency)
    assert expected_ms == 18.0
    assert (
        adapt_reserve(0.05, expected_ms, 18.0, 20.0, 0.01, 4) < 0.05 < adapt_reserve(0.05, told_ms, 18.0, 20.0, 0.01, 4)
    )


def test_full_batches_ahead_are_spread_over_the_processes() -> None:
    assert expected_finish_ms(load(waiting=4, busy=(0.0, 0.0), latency=(10.0, 12.0))) == 12.0 + 10.0
    assert expected_finish_ms(load(waiting=4, busy=(0.0,), latency=(10.0, 12.0))) == 24.0 + 10.0


def test_a_batch_that_can_still_fill_waits_as_long_as_it_may() -> None:
    assert expected_finish_ms(load(latency=(10.0, 12.0), max_wait=5.0)) == 15.0
    three = (10.0, 12.0, 14.0)
    assert expected_finish_ms(load(waiting=1, latency=three, max_wait=5.0, oldest=2.0)) == 3.0 + 12.0
    assert expected_finish_ms(load(waiting=1, latency=(10.0, 12.0), max_wait=5.0)) == 12.0  # it fills the batch


def test_behind_a_running_batch_the_time_is_that_of_the_batch_as_others_will_have_filled_it() -> None:
    times = (10.0, 12.0, 14.0, 16.0)
    assert expected_finish_ms(load(busy=(7.0,), latency=times)) == 7.0 + 10.0
    assert expected_finish_ms(load(busy=(7.0,), latency=times, joining=3)) == 7.0 + 14.0
    assert expected_finish_ms(load(busy=(7.0,), latency=times, joining=9)) == 7.0 + 16.0
    assert expected_finish_ms(load(waiting=3, busy=(7.0,), latency=times, joining=2)) == 7.0 + 16.0
    # What fills does not wait; what is not yet full, as long as it may.
    assert expected_finish_ms(load(busy=(7.0,), latency=times, joining=4, max_wait=9.0)) == 7.0 + 16.0
    assert expected_finish_ms(load(busy=(7.0,), latency=times, joining=3, max_wait=9.0)) == 9.0 + 14.0


def test_as_many_are_expected_to_join_as_come_while_a_batch_runs() -> None:
    count = 0.0
    for _ in range(20_000):  # one every 2 ms, for far more than ten full batches of 40 ms
        count = 1.0 + decay_count(count, 2.0, 40.0)
    times = [40.0] * 64
    assert forecast_joining(count, 32.0, times, 1, 16.0, inf) == (16 + 2)
    assert forecast_joining(count, 32.0, times, 2, 8.0, inf) == int(8 + 0.5 * 8**0.5 + 0.5)
    assert forecast_joining(count, 32.0, times[:8], 1, 16.0, inf) == 8
    assert forecast_joining(decay_count(count, 10_000.0, 40.0), 32.0, times, 1, 16.0, inf) == 0


def test_a_next_batch_is_expected_to_be_no_larger_than_those_let_in_can_wait_for() -> None:
    times, count = [10.0 + 30.0 * rows / 32.0 for rows in range(1, 33)], 320.0  # as many come as fit, ten batches long
    assert forecast_joining(count, 40.0, times, 1, 20.0, inf) == 32
    # 0.8 a ms come, evenly; a batch of n may hold those of the last 60 - T(n) ms: 0.8 (50 - 0.94 n) = n at n = 22.9.
    within = forecast_joining(count, 40.0, times, 1, 20.0, 60.0)
    assert within == pytest.approx(22.9 + 0.5 * 22.9**0.5 / 1.75, abs=1.0)
    # Whoever comes shortly before the replica is free can wait for any batch.
    assert forecast_joining(count, 40.0, times, 1, 5.0, 60.0) == 32
    assert forecast_joining(count, 40.0, times, 1, 20.0, 9.0) == 0


def test_who_joins_must_leave_the_oldest_of_its_batch_in_time() -> None:
    times = [10.0, 12.0, 14.0]
    assert not makes_oldest_late(0, 0.0, [5.0], times, 0.0, 1.0)  # nobody waits
    assert not makes_oldest_late(1, 8.0, [5.0], times, 0.0, 25.0)
    assert makes_oldest_late(1, 8.0, [5.0], times, 0.0, 24.0)
    assert not makes_oldest_late(1, 8.0, [5.0], times, 0.0, 22.0)  # it is late without
    assert not makes_oldest_late(3, 8.0, [5.0], times, 0.0, 24.0)  # another batch
    assert makes_oldest_late(1, 8.0, [9.0, 5.0], times, 0.0, 24.0)
    assert makes_oldest_late(1, 2.0, [0.0], times, 14.0, 25.0)  # it waits to be filled
    assert not makes_oldest_late(1, 8.0, [], times, 0.0, 24.0)


def test_the_more_is_refused_the_longer_a_batch_waits_to_be_filled_but_never_beyond_its_slo() -> None:
    # of 1000 arrivals none, 2, 10, 20, and at least 40 were refused; a full batch of 30 ms must be answered within 50
    times = [20.0, 30.0]
    waits = [extend_wait_ms(1.0, refused, 1000.0, 50.0, times) for refused in (0.0, 2.0, 10.0, 20.0, 40.0, 900.0)]
    assert waits == pytest.approx([1.0, 1.0, 5.0, 10.0, 20.0, 20.0], rel=5e-3)
    assert extend_wait_ms(7.0, 1.0, 1000.0, 50.0, times) == 7.0  # what the plan says holds in any case
    assert extend_wait_ms(1.0, 500.0, 1000.0, 25.0, times) == 1.0  # no full batch is in time


def test_a_batch_that_waits_to_be_filled_refuses_nobody_because_a_smaller_one_takes_longer() -> None:
    times = [20.0, 33.0, 30.0]
    wait_ms = extend_wait_ms(0.0, 500.0, 1000.0, 50.0, times)
    assert wait_ms == pytest.approx(17.0, rel=5e-3)
    assert not makes_oldest_late(1, 1.0, [0.0], times, wait_ms, 50.0)
    assert not makes_oldest_late(2, 1.0, [0.0], times, wait_ms, 50.0)


def test_who_fills_a_batch_makes_nobody_wait_for_others() -> None:
    # the oldest has waited 5 of the 20 ms that it may wait for others, and is to be answered within 50
    latency = (10.0, 20.0, 30.5)
    assert not makes_oldest_late(2, 5.0, [0.0], latency, 20.0, 50.0)  # three are sent now, and done after 35.5
    assert makes_oldest_late(2, 5.0, [15.0], latency, 20.0, 50.0)  # or once the process is free, after 50.5
    assert makes_oldest_late(2, 5.0, [0.0], (*latency, 40.0), 20.0, 50.0)  # with room for a fourth they are held


def test_who_finds_a_process_idle_and_nobody_waiting_is_let_in_whatever_is_expected() -> None:
    assert not is_refused(0, 1, finish_ms=500.0, waited_ms=0.0, deadline_ms=100.0, reserve=0.1)
    assert is_refused(0, 0, finish_ms=91.0, waited_ms=0.0, deadline_ms=100.0, reserve=0.1)
    assert is_refused(1, 1, finish_ms=91.0, waited_ms=0.0, deadline_ms=100.0, reserve=0.1)
    assert not is_refused(1, 0, finish_ms=89.0, waited_ms=0.0, deadline_ms=100.0, reserve=0.1)


def test_the_fastest_is_chosen_and_equals_take_turns() -> None:
    rule = FastestFirst()
    assert rule.choose([load(waiting=3), load(waiting=1), load(waiting=2)]) == 1
    assert sorted(rule.choose([load(), load()]) for _ in range(4)) == [0, 0, 1, 1]


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
def test_requests_ahead_save_at_most_what_their_batch_saves(waiting: int, processes: int, batch: int) -> None:
    latency = tuple(10.0 + i for i in range(batch))
    now = expected_finish_ms(load(waiting, (0.0,) * processes, latency))
    later = expected_finish_ms(load(waiting + batch, (0.0,) * processes, latency))
    assert later >= now


@pytest.mark.parametrize(
    ("waiting", "oldest_wait_ms", "taken"), [(0, 0.0, 0), (3, 1.9, 0), (3, 2.0, 3), (4, 0.0, 4), (9, 0.0, 4)]
)
def test_a_full_batch_goes_at_once_and_a_part_after_a_wait(waiting: int, oldest_wait_ms: float, taken: int) -> None:
    assert batch_size_now(waiting, 4, oldest_wait_ms, 2.0) == taken


def test_without_a_wait_whatever_is_there_goes() -> None:
    assert batch_size_now(1, 8, 0.0, 0.0) == 1


def test_a_request_waits_no_longer_than_leaves_time_to_serve_it() -> None:
    assert wait_limit_ms(50.0, 100.0, (10.0, 30.0)) == 50.0
    assert wait_limit_ms(50.0, 60.0, (10.0, 30.0)) == 30.0
    assert wait_limit_ms(50.0, 20.0, (10.0, 30.0)) == 0.0
    assert wait_limit_ms(50.0, 60.0, (10.0, 35.0, 30.0)) == 25.0  # measured, a smaller batch may take longer
    assert wait_limit_ms(5.0, 3.0, ()) == 3.0


def test_models_with_convolutions_are_padded() -> None:
    assert all(needs_padding({"Relu", op}) for op in ("Conv", "ConvTranspose", "FusedConv", "NhwcConv"))
    assert not needs_padding({"MatMul", "Softmax", "LSTM", "ConvInteger"})
    assert not needs_padding(())
