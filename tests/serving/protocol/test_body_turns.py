"""Large bodies: a few at a time, models in rotation, the newest first where others have waited for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuprof.serving.protocol.body_turns import LEAST_BYTES, MOST_BODIES, MOST_WAITING, BodyTurns

MS = 0.001
LONG_S = 50 * MS


class Reader:
    """A connection that notes its turns."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.body_bytes = 0
        self.gone = False

    def take_body_turn(self) -> None:
        self.site.begun.append(self.name)

    def drop_if_late(self, waited_s: float) -> bool:
        late = self.gone or waited_s > self.site.patience_s
        if late:
            self.site.refused.append(self.name)
        return late


class Site:
    """Readers, a clock, and what is called later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.patience_s = 10.0
        self.begun = list[str]()
        self.refused = list[str]()
        self.later = list[Callable[[], None]]()
        self.turns = BodyTurns(self.later.append)
        monkeypatch.setattr("gpuprof.serving.protocol.body_turns.time.monotonic", lambda: self.now)

    def ask(self, name: str, lane: str = "m", lifo_after_s: float = LONG_S) -> Reader:
        reader = Reader(self, name)
        if self.turns.begin(reader, lane, lifo_after_s):
            reader.take_body_turn()
        return reader

    def turn_loop(self) -> None:
        later, self.later[:] = list(self.later), []
        for call in later:
            call()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def fill(site: Site) -> list[Reader]:
    readers = [site.ask(f"first{number}") for number in range(MOST_BODIES)]
    assert site.begun == [reader.name for reader in readers]
    site.begun.clear()
    return readers


def test_one_that_is_whole_makes_room_for_who_waits(site: Site) -> None:
    first = fill(site)
    site.ask("a")
    site.ask("b")
    assert site.begun == []
    site.turns.end(first[0])
    assert site.begun == ["a"]
    site.turns.end(first[0])  # said twice: there is no more room than before
    assert site.begun == ["a"]
    site.turns.end(first[1])
    assert site.begun == ["a", "b"]


def test_a_lane_is_crowded_while_as_many_wait_as_may_however_they_leave(site: Site) -> None:
    first = fill(site)
    waiting = [site.ask(f"m{number}") for number in range(MOST_WAITING - 1)]
    site.ask("other", "other")
    assert not site.turns.crowded
    waiting.append(site.ask("last"))
    assert site.turns.crowded == {"m"}
    site.turns.end(first[0])
    assert not site.turns.crowded
    waiting.append(site.ask("again"))
    assert site.turns.crowded == {"m"}
    for reader in waiting:
        reader.gone = True
    site.turn_loop()
    assert not site.turns.crowded


def test_models_take_turns(site: Site) -> None:
    first = fill(site)
    for number in range(3):
        site.ask(f"cheap{number}", "cheap")
    site.ask("dear", "dear")
    for reader in first[:3]:
        site.turns.end(reader)
    assert site.begun == ["cheap0", "dear", "cheap1"]


def test_who_came_last_is_first_once_others_have_waited_for_long(site: Site) -> None:
    first = fill(site)
    for number in range(3):
        site.ask(f"old{number}")
    site.now += 60 * MS
    site.ask("new")
    for reader in first[:2]:
        site.turns.end(reader)
    assert site.begun == ["new", "old2"]


@pytest.mark.parametrize("trickle", [0, 1, LEAST_BYTES - 1])
def test_a_client_that_sends_little_in_a_turn_of_the_loop_keeps_nobody_waiting(site: Site, trickle: int) -> None:
    first = fill(site)
    site.ask("a")
    site.turn_loop()
    assert site.begun == []  # the loop has not looked yet what there is of bodies whose turn has just begun
    first[0].body_bytes += trickle
    for reader in first[1:]:
        reader.body_bytes += LEAST_BYTES
    site.turn_loop()
    assert site.begun == ["a"]
    site.turns.end(first[0])  # goes on beside the others, and has no turn to give back
    site.ask("b")
    assert site.begun == ["a"]


def test_the_order_is_kept_where_the_first_can_still_wait_whatever_time_the_others_have(site: Site) -> None:
    first = fill(site)
    for number in range(3):
        site.ask(f"old{number}", lifo_after_s=10.0)
    site.now += 60 * MS
    site.ask("new")
    for reader in first[:2]:
        site.turns.end(reader)
    assert site.begun == ["old0", "old1"]


def test_who_can_no_longer_be_in_time_is_refused_without_waiting_for_room(site: Site) -> None:
    first = fill(site)
    site.patience_s = 0.2
    site.ask("a")
    site.now += 150 * MS
    site.ask("b")
    site.now += 60 * MS
    site.turn_loop()
    assert site.refused == ["a"] and site.begun == []
    site.turns.end(first[0])
    assert site.begun == ["b"]


def test_connections_that_are_gone_are_passed_over(site: Site) -> None:
    first = fill(site)
    waiting = [site.ask(name) for name in "abc"]
    waiting[0].gone = waiting[1].gone = True
    site.turns.end(first[0])
    assert site.begun == ["c"]
    assert not any(site.turns.begin(reader, "m", LONG_S) for reader in first[:1])  # nobody has room beside eight


def test_nothing_is_checked_while_nobody_waits(site: Site) -> None:
    first = fill(site)
    site.ask("a")
    assert len(site.later) == 1
    site.turns.end(first[0])
    site.later.pop()()
    assert site.later == []
