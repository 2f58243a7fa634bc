"""Turns of the loop among models: who waits while it is late, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from gpuprof.serving.protocol.loop_turns import PERIOD_S, LoopTurns

MS = 0.001


class Loop:
    """A loop in which each request takes so long to read, and three times as long altogether.

    ``asked`` are requests that come in each period, by model; what is read in the periods is counted.
    """

    def __init__(self, asked: dict[str, int], cost_s: dict[str, float]) -> None:
        self.turns = LoopTurns()
        self.read = dict.fromkeys(asked, 0)
        self._asked = asked
        self._cost_s = cost_s
        self._busy_s = 0.0

    def run(self, periods: int) -> float:
        """Return the length of the last period in seconds, PERIOD_S where all was done in time."""
        took_s = PERIOD_S
        for _ in range(periods):
            self._busy_s, self.read = 0.0, dict.fromkeys(self.read, 0)
            for name, count in self._asked.items():
                for _ in range(count):
                    self._ask(name)
            took_s = max(PERIOD_S, self._busy_s)
            due, computed = self.turns._due, self.turns._computed_s
            self.turns.begin_period(due - PERIOD_S + took_s, computed + self._busy_s)
        return took_s

    def _ask(self, name: str) -> None:
        if self.turns.admits(name):
            self._serve(name)
        else:
            self.turns.wait(name, lambda: self._serve(name))

    def _serve(self, name: str) -> None:
        self.read[name] += 1
        self._busy_s += 3.0 * self._cost_s[name]
        self.turns.charge(name, self._cost_s[name])


def run(test: Callable[[], None]) -> None:
    async def main() -> None:
        test()

    asyncio.run(main())


def test_a_model_that_asks_for_more_than_the_loop_can_do_takes_its_part_beside_another() -> None:
    def test() -> None:
        loop = Loop({"cheap": 400, "dear": 2}, {"cheap": 0.05 * MS, "dear": 0.1 * MS})
        assert loop.run(1) > 5.0 * PERIOD_S
        assert loop.run(60) < 1.5 * PERIOD_S
        # Two models: half a period is at most 33 requests of 0.15 ms.
        assert loop.read["cheap"] >= 33
        assert loop.read["dear"] == 2

    run(test)


def test_a_model_alone_is_not_kept_from_anything() -> None:
    def test() -> None:
        loop = Loop({"cheap": 400}, {"cheap": 0.05 * MS})
        loop.run(30)
        assert loop.read["cheap"] == 400

    run(test)


def test_a_loop_that_is_late_because_others_have_its_core_lets_everybody_on() -> None:
    def test() -> None:
        turns = LoopTurns()
        for _ in range(50):
            for name in ("a", "b"):
                for _ in range(100):
                    assert turns.admits(name)
                    turns.charge(name, 0.01 * MS)
            turns.begin_period(turns._due + 0.05, turns._computed_s + 0.01)

    run(test)


def test_what_waited_is_read_in_its_order_when_the_loop_is_in_time_again() -> None:
    def test() -> None:
        turns, read = LoopTurns(), list[int]()
        for name in ("a", "b"):
            for _ in range(100):
                turns.charge(name, 0.05 * MS)
        turns.charge("a", 0.05 * MS)
        turns.begin_period(turns._due + 0.1, turns._computed_s + 0.1)
        for number in range(200):
            if turns.admits("a"):
                turns.charge("a", 0.05 * MS)
            else:
                turns.wait("a", partial(read.append, number))
        assert not turns.admits("a") and turns.admits("b")
        for _ in range(200):
            turns.begin_period(turns._due, turns._computed_s)
        assert read == sorted(read) and len(read) > 50
        assert turns.admits("a") and not turns._accounts

    run(test)
