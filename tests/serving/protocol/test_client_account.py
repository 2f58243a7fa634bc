"""How much clients, and each of their connections, may send beside data."""

from __future__ import annotations

from gpuprof.serving.protocol.client_account import ClientAccount, ConnectionAccount


def flood(connection: ConnectionAccount, begin: float, end: float) -> int:
    """Send seven thousand frames whenever that may be done; return how many."""
    sent, now = 0, begin
    while now < end:
        if connection.may_send(now):
            connection.spend(7000, now)
            sent += 7000
        now += 0.01
    return sent


def test_a_connection_that_sends_little_goes_on_beside_one_that_floods() -> None:
    client = ClientAccount(0.0)
    modest, greedy = ConnectionAccount(client, 0.0), ConnectionAccount(client, 0.0)
    for second in range(60):
        flood(greedy, float(second), second + 1.0)
        assert modest.may_send(second + 1.0)
        modest.spend(50, second + 1.0)


def test_connections_that_flood_send_no_more_for_being_many() -> None:
    for count in (1, 10, 200):
        client = ClientAccount(0.0)
        connections = [ConnectionAccount(client, 0.0) for _ in range(count)]
        sent, now = 0, 0.0
        while now < 60.0:
            for one in connections:
                if one.may_send(now):
                    one.spend(100, now)
                    sent += 100
            now += 0.01
        assert sent < 3 * 60 * 20_000


def test_a_connection_that_has_just_been_opened_has_nothing_of_its_own_yet() -> None:
    client = ClientAccount(0.0)
    flood(ConnectionAccount(client, 0.0), 0.0, 5.0)
    client.spend(10_000, 5.0)
    new = ConnectionAccount(client, 5.0)
    assert not new.may_send(5.0) and new.may_send(5.1)


def test_parts_are_larger_when_connections_have_gone() -> None:
    client = ClientAccount(0.0)
    first, *others = [ConnectionAccount(client, 0.0) for _ in range(10)]
    client.spend(10**9, 0.0)
    first.spend(6000, 0.0)
    assert not first.may_send(1.0)
    for one in others:
        one.close()
    assert first.may_send(1.5)
