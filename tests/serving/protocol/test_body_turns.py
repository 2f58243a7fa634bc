"""Large bodies: a few at a time, models in rotation, the newest first where others have waited for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuprof.serving.protocol.body_turns import MOST_BODIES, SILENT_S, BodyTurns

MS = 0.001


class Reader:
    """A connection that notes its turns."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.touched = site.now
        self.gone = False

    def take_body_turn(self) -> None:
        self.touched = self.site.now
        self.site.begun.append(self.name)

    def gives_up(self, waited_s: float) -> bool:
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
        self.turns = BodyTurns(lambda _, call: self.later.append(call))
        monkeypatch.setattr("gpuprof.serving.protocol.body_turns.time.monotonic", lambda: self.now)

    def ask(self, name: str, lane: str = "m") -> Reader:
        reader = Reader(self, name)
        if self.turns.begin(reader, lane):
            reader.take_body_turn()
        return reader

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self.later:
            self.later.pop()()
            if seconds == 0.0:
                return
            seconds = 0.0


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


def test_a_silent_client_keeps_nobody_waiting(site: Site) -> None:
    first = fill(site)
    site.ask("a")
    for reader in first[1:]:
        reader.touched = site.now + SILENT_S
    site.pass_time(SILENT_S + MS)
    assert site.begun == ["a"]
    site.turns.end(first[0])  # goes on beside the others, and has no turn to give back
    site.ask("b")
    assert site.begun == ["a"]


def test_who_can_no_longer_be_in_time_is_refused_without_waiting_for_room(site: Site) -> None:
    first = fill(site)
    site.patience_s = 0.2
    site.ask("a")
    site.now += 150 * MS
    site.ask("b")
    site.now += 60 * MS
    for reader in first:
        reader.touched = site.now
    site.pass_time(0.0)
    assert site.refused == ["a"] and site.begun == []
    site.turns.end(first[0])
    assert site.begun == ["b"]


def test_connections_that_are_gone_are_passed_over(site: Site) -> None:
    first = fill(site)
    waiting = [site.ask(name) for name in "abc"]
    waiting[0].gone = waiting[1].gone = True
    site.turns.end(first[0])
    assert site.begun == ["c"]
    assert not any(site.turns.begin(reader, "m") for reader in first[:1])  # nobody has room beside eight


def test_nothing_is_checked_while_nobody_waits(site: Site) -> None:
    first = fill(site)
    site.ask("a")
    assert len(site.later) == 1
    site.turns.end(first[0])
    site.later.pop()()
    assert site.later == []
