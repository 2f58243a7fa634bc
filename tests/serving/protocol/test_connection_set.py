"""Which connection makes room for another: nobody keeps others out by holding connections."""

from __future__ import annotations

import random

import pytest

from gpuprof.serving.protocol.connection_set import ConnectionSet


class Opened:
    """A connection, idle or not, that notes whether it was closed."""

    def __init__(self, peer: str, touched: float = 0.0, is_idle: bool = False) -> None:
        self.peer, self.touched, self.is_idle, self.is_aborted = peer, touched, is_idle, False
        self.is_unfinished = False

    def is_idle_at(self, now: float) -> bool:
        return self.is_idle

    def is_unfinished_at(self, now: float) -> bool:
        return self.is_unfinished

    def abort(self) -> None:
        self.is_aborted = True


def fill(connections: ConnectionSet[Opened], peer: str, count: int, is_idle: bool = False) -> list[Opened]:
    opened = [Opened(peer, float(number), is_idle) for number in range(count)]
    assert all(connections.add(one, 0.0) for one in opened)
    return opened


def test_a_client_with_all_that_it_may_have_in_use_gets_no_more_and_others_do() -> None:
    connections = ConnectionSet[Opened](3, 100)
    held = fill(connections, "a", 3)
    assert not connections.add(Opened("a"), 0.0)
    assert connections.add(Opened("b"), 0.0)
    assert not any(one.is_aborted for one in held) and connections.turned_away == 1
    connections.discard(held[1])
    connections.discard(held[1])
    assert connections.add(Opened("a"), 0.0) and len(connections) == 4


def test_the_connection_that_has_been_idle_longest_makes_room_for_another_of_its_client() -> None:
    connections = ConnectionSet[Opened](4, 100)
    others, held = fill(connections, "b", 4, is_idle=True), fill(connections, "a", 4)
    held[1].is_idle = held[3].is_idle = True
    new = Opened("a")
    assert connections.add(new, 0.0)
    assert [one.is_aborted for one in (*held, *others)] == [False, True, *[False] * 6]
    assert new in list(connections) and held[1] not in list(connections) and connections.turned_away == 1


def test_a_request_that_does_not_become_whole_makes_room_for_another_connection_of_its_client_only() -> None:
    connections = ConnectionSet[Opened](3, 100)
    held, others = fill(connections, "a", 3), fill(connections, "b", 2)
    for one in (held[1], held[2], *others):
        one.is_unfinished = True
    assert connections.add(Opened("a"), 0.0)
    assert [one.is_aborted for one in (*held, *others)] == [False, True, False, False, False]
    held[2].is_idle = True
    assert connections.add(Opened("a"), 0.0) and held[2].is_aborted
    assert not connections.add(Opened("a"), 0.0) and not held[0].is_aborted


@pytest.mark.parametrize("is_idle", [True, False])
def test_who_has_most_gives_one_up_where_there_are_too_many_in_all(is_idle: bool) -> None:
    connections = ConnectionSet[Opened](1024, 2048)
    held = [*fill(connections, "a", 1024, is_idle), *fill(connections, "b", 1024, is_idle)]
    new = [Opened(f"c{number}") for number in range(100)]
    assert all(connections.add(one, 0.0) for one in new)
    assert sum(one.is_aborted for one in held) == 100 and not any(one.is_aborted for one in new)
    assert abs(sum(one.is_aborted for one in held[:1024]) - 50) <= 1
    assert len(connections) == 2048


def test_where_all_have_as_many_nobody_gives_up_what_is_in_use() -> None:
    connections = ConnectionSet[Opened](10, 4)
    held = [*fill(connections, "a", 2), *fill(connections, "b", 2)]
    assert not connections.add(Opened("a"), 0.0)
    assert connections.add(first := Opened("c"), 0.0) and sum(one.is_aborted for one in held) == 1
    assert not connections.add(Opened("d"), 0.0) or not first.is_aborted


def test_counts_stay_right_whatever_comes_and_goes() -> None:
    rng, connections, opened = random.Random(0), ConnectionSet[Opened](7, 20), set[Opened]()
    for _ in range(5000):
        if opened and rng.random() < 0.4:
            connections.discard(gone := rng.choice(sorted(opened, key=id)))
            opened.discard(gone)
        else:
            one = Opened(f"c{rng.randrange(6)}", rng.random(), rng.random() < 0.3)
            if connections.add(one, 0.0):
                opened.add(one)
        opened = {one for one in opened if not one.is_aborted}
        assert set(connections) == opened and len(connections) == len(opened) <= 20
        of_each = [sum(one.peer == peer for one in opened) for peer in {one.peer for one in opened}]
        assert max(of_each, default=0) == connections._largest <= 7
