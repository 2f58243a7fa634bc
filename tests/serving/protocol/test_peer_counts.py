from __future__ import annotations

from gpuprof.serving.protocol.peer_counts import PeerCounts


def test_however_many_clients_take_what_they_can_another_finds_as_much() -> None:
    calls = PeerCounts(2_048, 8_000)
    held = dict.fromkeys((f"10.0.0.{host}" for host in range(1, 20)), 0)
    for _ in range(3_000):
        for client in held:
            held[client] += calls.add(client)
    assert set(held.values()) == {400}
    assert sum(calls.add("10.0.1.1") for _ in range(3_000)) == 200
    for client, count in held.items():
        for _ in range(count):
            calls.discard(client)
    assert sum(calls.add("10.0.1.2") for _ in range(3_000)) == 2_048
