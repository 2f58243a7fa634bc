"""Which connections are found to send what is no message."""

from __future__ import annotations

import random

from gpuprof.serving.protocol.grpc_connection_bytes import ConnectionBytes, Peer

LIMIT = 1 << 20
URI, PEER = "ipv4:10.0.0.7:4242", ("10.0.0.7", 4242)
ONCE = 16 << 20


def judge(connections: ConnectionBytes, received: dict[Peer, int], times: int = 5) -> list[Peer]:
    """Look so often, a tenth of a second apart, with the same bytes received."""
    looks = [connections.judge(connections.explain(), received, elapsed_s=0.1) for _ in range(times)]
    return [peer for futile in looks for peer in futile]


def test_messages_explain_what_came_however_much() -> None:
    connections, rng, received = ConnectionBytes(LIMIT), random.Random(1), 0
    for _ in range(200):
        for _ in range(rng.randrange(40)):
            size = rng.randrange(LIMIT)
            connections.begin_message(URI)
            connections.end_message(URI, size)
            received += int(1.01 * size) + rng.randrange(4000)
        assert not judge(connections, {PEER: received}, 1)
    assert received > 20 * ONCE


def test_who_sends_more_than_messages_is_found_and_nobody_else() -> None:
    connections = ConnectionBytes(LIMIT)
    other = ("10.0.0.8", 4242)
    assert not judge(connections, {PEER: 0, other: 0})
    for uri in (URI, "ipv4:10.0.0.8:4242"):
        connections.begin_message(uri)
        connections.end_message(uri, ONCE // 8)
    assert judge(connections, {PEER: 2 * ONCE, other: ONCE // 2}) == [PEER]


def test_who_has_sent_no_messages_is_allowed_less() -> None:
    connections = ConnectionBytes(LIMIT)
    assert not judge(connections, {PEER: 0})
    assert not judge(connections, {PEER: 1 << 19})
    assert judge(connections, {PEER: 1 << 22}) == [PEER]


def test_who_keeps_a_call_waiting_whose_messages_are_short_is_allowed_no_long_one() -> None:
    connections = ConnectionBytes(8 * ONCE)
    connections.begin_message(URI, 1 << 16)
    connections.begin_message(URI, 1 << 16)
    connections.end_message(URI, None, 1 << 16)
    assert judge(connections, {PEER: ONCE}) == [PEER]


def test_what_messages_explained_before_explains_nothing_later() -> None:
    connections = ConnectionBytes(LIMIT)
    for _ in range(100):
        connections.begin_message(URI)
        connections.end_message(URI, None)  # it was cancelled: as much as there may be counts
    assert not judge(connections, {PEER: 1000})
    assert judge(connections, {PEER: ONCE + 2 * LIMIT}) == [PEER]


def test_a_little_for_a_long_time_is_allowed() -> None:
    connections, received = ConnectionBytes(LIMIT), 0
    for _ in range(1000):
        received += 80_000  # a tenth of a second
        assert not judge(connections, {PEER: received}, 1)
    assert received > 4 * ONCE


def test_a_message_that_is_not_whole_may_be_as_long_as_messages_may_be() -> None:
    connections = ConnectionBytes(8 * ONCE)
    connections.begin_message(URI)
    assert not judge(connections, {PEER: 8 * ONCE})
    connections.begin_message(URI)
    connections.end_message(URI, 1)
    assert not judge(connections, {PEER: 8 * ONCE})  # one of them goes on
    connections.end_message(URI, 8 * ONCE)
    assert not judge(connections, {PEER: 8 * ONCE})


def test_addresses_of_version_6_are_known_as_the_system_writes_them() -> None:
    connections = ConnectionBytes(LIMIT)
    for uri in ("ipv6:%5B::1%5D:99", "ipv6:%5Bfe80::1%25eth0%5D:98"):
        connections.begin_message(uri)
        connections.end_message(uri, 5)
    assert set(connections.explain()) == {("::1", 99), ("fe80::1", 98)}


def test_connections_that_are_no_more_are_forgotten() -> None:
    connections = ConnectionBytes(LIMIT)
    connections.begin_message(URI)
    connections.end_message(URI, 5)
    assert not judge(connections, {PEER: 5})
    assert connections.explain()
    assert not judge(connections, {})
    assert not connections.explain()
