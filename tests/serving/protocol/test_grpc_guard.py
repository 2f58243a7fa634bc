"""What heads of many fields cost the server of gRPC, attacked in a process of its own whose memory is bounded."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from gpuprof.serving.protocol.connection_files import ConnectionFiles
from gpuprof.serving.protocol.grpc_head_fields import MAX_FIELDS, HeadFields
from tests.reruns import serves_in_real_time

#: Attacks its own server for two seconds by four threads; prints by how many MB it has grown at most.
_ATTACKED = """
import asyncio, resource, sys, threading, time
from types import SimpleNamespace

from bench.grpc_attacks import indexed_heads
from gpuprof.serving.protocol.grpc_server import GrpcServer
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.watch.memory import private_bytes, set_up_heaps

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
set_up_heaps()


async def main():
    server = GrpcServer(Router(Arena(1 << 20)), 1 << 20)
    target = SimpleNamespace(grpc=await server.start("127.0.0.1", 0))
    until, before, most = time.monotonic() + 2.0, private_bytes(), 0
    attackers = [
        threading.Thread(target=indexed_heads, args=(target, lambda: time.monotonic() < until), daemon=True)
        for _ in range(4)
    ]
    for attacker in attackers:
        attacker.start()
    while any(attacker.is_alive() for attacker in attackers):
        await asyncio.sleep(0.01)
        most = max(most, private_bytes() - before)
        if most > 3 << 30:
            break
    print(most >> 20, flush=True)
    import os
    os._exit(0)


asyncio.run(main())
"""


@serves_in_real_time
def test_heads_of_half_a_million_fields_do_not_take_the_memory_of_the_machine() -> None:
    ran = subprocess.run([sys.executable, "-c", _ATTACKED], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 768


def test_fields_beyond_those_that_a_head_may_have_become_one_object() -> None:
    fields = HeadFields()
    head = [fields.make_field("a", str(number)) for number in range(20 * MAX_FIELDS)]
    assert len(set(map(id, head[10 * MAX_FIELDS :]))) == 1
    assert fields.are_too_many(head)
    assert fields.make_field("a", "b") == ("a", "b")
    assert not fields.are_too_many([("a", "b")])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_to_a_port_are_found_with_what_they_have_received_and_no_others(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        files = ConnectionFiles(port := listening.getsockname()[1])
        assert not files.look()
        with socket.create_connection((host, port)) as client, listening.accept()[0] as accepted:
            client.sendall(bytes(1000))
            peer = client.getsockname()[:2]
            assert files.look() == {peer: 1000}
            assert not files.shut_down((host, 1))
            assert files.shut_down(peer)
            assert len(accepted.recv(2000)) == 1000
            assert accepted.recv(1) == b""
            assert client.recv(1) == b""
        assert not files.look()


def test_a_port_that_is_paused_takes_connections_again_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        files = ConnectionFiles(listening.getsockname()[1])
        files.narrow()
        files.pause()
        with socket.socket() as client:
            client.settimeout(0.05)
            with pytest.raises(TimeoutError):
                client.connect(listening.getsockname())
        files.resume()
        with socket.create_connection(listening.getsockname(), timeout=30) as client, listening.accept()[0] as accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_connections_receive_little_ahead_until_they_are_widened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        files = ConnectionFiles(port := listening.getsockname()[1])
        files.narrow()
        with socket.create_connection(("127.0.0.1", port)) as client, listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < 8192
            files.look()
            assert files.widen(client.getsockname())
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > 1 << 17
            assert not files.widen(("127.0.0.1", 1))
