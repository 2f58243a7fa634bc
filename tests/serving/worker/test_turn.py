"""Turns of the models of a worker: one at a time, first come, first served."""

from __future__ import annotations

import threading
from functools import partial

from gpuprof.serving.worker.turn import Turns
from tests.serving.running import eventually


def _has_waiting(turns: Turns, count: int) -> bool:
    return len(turns._waiting) == count


def test_turns_are_taken_one_at_a_time_in_the_order_of_arrival() -> None:
    turns, order, running = Turns(), list[int](), list[int]()

    def run(number: int) -> None:
        with turns:
            running.append(number)
            assert running == [number]
            order.append(number)
            running.remove(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            assert eventually(partial(_has_waiting, turns, number + 1))
        assert order == []
    for thread in threads:
        thread.join(30.0)
    assert order == list(range(20))
    with turns:  # free again
        pass


def test_a_turn_that_fails_is_passed_on() -> None:
    turns, done = Turns(), threading.Event()

    def run() -> None:
        with turns:
            done.set()

    thread = threading.Thread(target=run)
    try:
        with turns:
            thread.start()
            assert eventually(lambda: bool(turns._waiting))
            raise ValueError
    except ValueError:
        pass
    assert done.wait(30.0)
    thread.join(30.0)
