"""Whose turn it is: priorities first, then the clients in turn, each in its own order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.router.request_queue import RequestQueue
from gpuprof.serving.transport.inference import Inference


def request(name: Any, priority: int = 0, arrived: float = 0.0, deadline_ms: float = 100.0) -> Inference:
    return Inference(1, [], [name], arrived, deadline_ms, lambda *_: None, lambda *_: None, priority)


def names(requests: Any) -> list[Any]:
    return [request.wanted[0] for request in requests]


def test_one_client_s_requests_go_as_they_came() -> None:
    queue = RequestQueue()
    for name in range(5):
        queue.add(request(name), ("a", False))
    assert names(queue) == [0, 1, 2, 3, 4]
    assert names(queue.take(2)) == [0, 1]
    queue.add(request(5), ("a", False))
    assert names(queue.take(9)) == [2, 3, 4, 5]
    assert queue.rows == 0


def test_a_client_with_many_requests_waits_for_one_with_few() -> None:
    queue = RequestQueue()
    for name in range(6):
        queue.add(request(name), ("many", False))
    assert queue.rows_before(0, ("few", False)) == 1
    assert queue.rows_before(0, ("many", False)) == 6
    for letter in "ab":
        queue.add(request(letter), ("few", False))
    assert names(queue) == [0, "a", 1, "b", 2, 3, 4, 5]


def test_requests_that_may_wait_for_an_hour_leave_the_others_of_their_client_every_second_turn() -> None:
    queue = RequestQueue()
    for name in range(60):
        queue.add(request(name), ("a", True))
    queue.take(10)
    assert queue.rows_before(0, ("a", False)) <= 1


def test_a_higher_priority_goes_first_whoever_sends_it() -> None:
    queue = RequestQueue()
    for name in range(3):
        queue.add(request(name, priority=1), ("a", False))
    assert queue.rows_before(0, ("a", False)) == 0
    queue.add(request("urgent"), ("a", False))
    assert names(queue) == ["urgent", 0, 1, 2]


def test_only_what_others_went_before_is_given_up_and_only_when_it_is_late() -> None:
    queue = RequestQueue()
    queue.add(request("first", priority=1), ("a", False))
    assert queue.remove_late(10.0, 5.0) == []  # late, but nobody went before it
    queue.add(request("second", priority=1, arrived=9.95), ("a", False))
    queue.add(request("urgent", arrived=9.9), ("a", False))
    assert names(queue.remove_late(10.0, 5.0)) == ["first"]
    assert names(queue) == ["urgent", "second"]
    assert queue.rows == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=40))
def test_what_is_said_to_go_before_a_request_does_and_nothing_is_lost(coming: list[tuple[str, int]]) -> None:
    queue = RequestQueue()
    for number, (client, priority) in enumerate(coming):
        before = queue.rows_before(priority, (client, False))
        queue.add(request(number, priority), (client, False))
        assert names(queue).index(number) == before
        if number % 5 == 4:
            queue.take(2)
    left = names(queue)
    for client in "abc":
        for priority in range(3):
            numbers = [number for number in left if coming[number] == (client, priority)]
            assert numbers == sorted(numbers)
