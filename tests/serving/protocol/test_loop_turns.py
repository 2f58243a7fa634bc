"""Turns of the loop among models: who waits, for how long at most, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

import pytest

from gpuprof.serving.protocol.loop_turns import (
    DISCARDED_BYTES,
    NEWEST_FOR_OLDEST,
    TURN_S,
    DiscardTurns,
    LoopTurns,
)

MS = 0.001


class StubRouter:
    """Reads requests, each of which takes a time that is played; what was read is kept in its order, by lane."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.read: list[tuple[str, int]] = []
        self.held = set[str]()
        self.turns = LoopTurns(held=self.held)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def ask(self, lane: str, number: int, took_s: float = 0.2 * MS) -> None:
        if self.turns.admits_all(self.now) or self.turns.admits(lane, self.now):
            self._answer(lane, number, took_s)
        else:
            self.turns.wait(lane, partial(self._answer, lane, number, took_s))

    def _answer(self, lane: str, number: int, took_s: float) -> None:
        self.now += took_s
        self.read.append((lane, number))


def run(test: Callable[[], object]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        monotonic = time.monotonic
        loop.time = lambda: monotonic()  # type: ignore[method-assign]
        await test()  # type: ignore[misc]

    asyncio.run(main())


def test_a_dear_model_is_read_in_the_next_turn_beside_thousands_of_requests_of_a_cheap_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        for number in range(3000):
            router.ask("cheap", number)
        router.ask("dear", 0)
        first = len(router.read)
        assert first == math.ceil(TURN_S / (0.2 * MS))
        await asyncio.sleep(0)
        assert ("dear", 0) in router.read[first : first + 2]
        assert len(router.read) <= 2 * first + 1  # and the loop looks again who has something to read

    run(test)


def test_what_waits_is_read_in_its_order_until_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        for number in range(100):
            router.ask("m", number)
        for _ in range(40):
            await asyncio.sleep(0)
        assert router.read == [("m", number) for number in range(100)]
        assert not router.turns._lanes
        router.now += 1.0
        router.ask("m", 100)
        assert router.read[-1] == ("m", 100)  # nobody waits: it need not, either

    run(test)


def test_what_comes_in_the_next_turn_is_read_at_once_however_soon_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        for number in range(20):
            router.ask("m", number, 1.5 * TURN_S)
            assert len(router.read) == number + 1
            await asyncio.sleep(0)

    run(test)


def test_where_some_have_waited_for_long_the_newest_are_read_and_the_oldest_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        router.ask("m", -1, TURN_S)
        count = 2 * NEWEST_FOR_OLDEST
        for number in range(count):
            for lane in ("a", "b"):
                router.ask(lane, number, 0.1 * MS)
        router.now += 1.0
        for _ in range(2 * count):
            await asyncio.sleep(0)
        newest = list(range(count - 1, 0, -1))
        expected = [*newest[:NEWEST_FOR_OLDEST], 0, *newest[NEWEST_FOR_OLDEST:]]
        for lane in ("a", "b"):  # each by itself
            assert [number for name, number in router.read if name == lane] == expected

    run(test)


def test_requests_of_a_lane_that_is_held_wait_until_it_is_not_and_no_other_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        router.held.add("m")
        for number in range(3):
            router.ask("m", number)
        router.ask("other", 0)
        await asyncio.sleep(0)
        assert router.read == [("other", 0)]
        router.ask("other", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert router.read == [("other", 0), ("other", 1)]
        router.held.clear()
        for _ in range(3):
            await asyncio.sleep(0)
        assert router.read[2:] == [("m", 0), ("m", 1), ("m", 2)]

    run(test)


def test_a_reader_that_fails_takes_no_turn_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        router.ask("m", 0, TURN_S)

        def fail() -> None:
            raise ValueError

        assert not router.turns.admits_all(router.now) and not router.turns.admits("m", router.now)
        router.turns.wait("m", fail)
        router.ask("m", 1)
        for _ in range(4):
            await asyncio.sleep(0)
        assert [type(one) for one in failures] == [ValueError]
        assert router.read == [("m", 0), ("m", 1)]

    run(test)


def test_lanes_are_served_in_rotation_even_where_each_request_takes_a_whole_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        for number in range(6):
            router.ask("cheap", number, 2.0 * TURN_S)
        router.ask("dear", 0, 2.0 * TURN_S)
        for _ in range(3):
            await asyncio.sleep(0)
        assert ("dear", 0) in router.read[:3]

    run(test)


def test_bodies_that_are_refused_are_received_in_their_order_a_few_in_each_turn() -> None:
    due: list[Callable[[], object]] = []
    discards, resumed = DiscardTurns(due.append), list[int]()
    for number in range(6):
        discards.wait(partial(resumed.append, number), DISCARDED_BYTES // 2)
    due.pop()()
    assert resumed == [0, 1] and len(due) == 1
    discards.wait(partial(resumed.append, 6), DISCARDED_BYTES)
    while due:
        due.pop()()
    assert resumed == list(range(7))


def test_a_body_that_cannot_be_received_does_not_hold_up_the_others() -> None:
    due: list[Callable[[], object]] = []
    discards, resumed = DiscardTurns(due.append), list[int]()

    def fail() -> None:
        raise OSError("closed")

    discards.wait(fail, 1)
    discards.wait(partial(resumed.append, 1), 1)
    with pytest.raises(OSError, match="closed"):
        due.pop()()
    due.pop()()
    assert resumed == [1]


def test_what_is_read_last_in_a_turn_waits_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        router = StubRouter(monkeypatch)
        assert router.turns.arrival(router.now) == router.now  # nobody was read yet
        began = router.now
        router.ask("m", 0, took_s=30 * MS)  # the only one that is read in this turn, and its bodies take long
        assert router.turns.arrival(router.now) == began
        router.ask("m", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        router.now += 1.0
        assert router.turns.arrival(router.now) == router.now  # the loop has looked again who has something to read

    run(test)
