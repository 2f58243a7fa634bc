from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuprof.serving.listening import (
    CONNECTIONS_PER_TURN,
    AcceptedSockets,
    ConnectionAcceptor,
    stop_listening,
)
from tests.reruns import serves_in_real_time
from tests.serving.running import eventually, map_of, replica, running

pytestmark = serves_in_real_time


def test_who_waits_at_the_door_is_let_in_and_who_comes_later_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        early = [socket.create_connection(address) for _ in range(3)]
        waiting = stop_listening([listener])
        assert {accepted.getpeername() for accepted in waiting} == {client.getsockname() for client in early}
        with socket.socket() as late:
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect(address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for connection in (*early, *waiting):
        connection.close()


def test_all_wait_to_be_accepted_who_connect_while_the_router_has_no_time(tmp_path: Path, many_files: None) -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    count = min(1500, most)
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        server.process.send_signal(signal.SIGSTOP)
        clients = []
        try:
            for _ in range(count):
                clients.append(socket.socket())
                clients[-1].setblocking(False)
                clients[-1].connect_ex(("127.0.0.1", server.port))
            assert eventually(lambda: _count_unaccepted(server.port) == count), _count_unaccepted(server.port)
        finally:
            server.process.send_signal(signal.SIGCONT)
            for client in clients:
                client.close()


def _count_unaccepted(port: int) -> int:
    """Return how many connections wait to be accepted: of a socket that listens the kernel tells it as rx_queue."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return next(int(row[4].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}"))


def test_more_than_one_connection_is_accepted_in_a_turn_of_the_loop() -> None:
    taken: list[socket.socket] = []
    peers: set[object] = set()

    async def make_connection(accepted: socket.socket) -> None:
        taken.append(accepted)
        peers.add(accepted.getpeername())
        if len(taken) == 2:
            raise ConnectionResetError  # who has gone meanwhile keeps nobody out

    async def accept_twice(listener: socket.socket, clients: list[socket.socket]) -> None:
        intake = ConnectionAcceptor([listener], make_connection)
        intake.accept_more()
        await asyncio.sleep(0)
        assert peers == {client.getsockname() for client in clients}
        assert [one.fileno() for one in taken].index(-1) == 1  # what failed is closed
        intake.accept_more()  # nobody waits
        intake.close()
        intake.accept_more()
        await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        asyncio.run(accept_twice(listener, clients))
        assert len(taken) == 5
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):  # no copy of the socket is left that would let clients in
        socket.create_connection(address)
    for connection in (*clients, *taken):
        connection.close()


def test_of_hundreds_of_connections_of_a_client_the_last_is_made_next_but_one_and_that_of_another_client_next() -> None:
    accepted = AcceptedSockets()
    with ExitStack() as opened:
        flood = [opened.enter_context(socket.socket()) for _ in range(300)]
        for one in flood:
            accepted.add("10.0.0.1", one)
        assert [accepted.take() for _ in range(5)] == [flood[0], flood[-1], flood[1], flood[-2], flood[2]]
        other = opened.enter_context(socket.socket())
        accepted.add("10.0.0.2", other)
        assert other in [accepted.take() for _ in range(2)]
        rest = [accepted.take() for _ in range(len(accepted))]
        assert len(rest) == len(set(rest)) == 294 and other not in rest


def test_so_many_connections_are_made_in_a_turn_of_the_loop_and_one_of_another_client_is_among_the_first() -> None:
    taken: list[socket.socket] = []

    async def make_connection(accepted: socket.socket) -> None:
        taken.append(accepted)

    async def accept_flood(listener: socket.socket, other: socket.socket) -> None:
        intake = ConnectionAcceptor([listener], make_connection)
        intake.accept_more()
        await asyncio.sleep(0)
        assert len(taken) == CONNECTIONS_PER_TURN
        assert other.getsockname() in [one.getpeername() for one in taken]
        await asyncio.sleep(0)
        assert len(taken) <= 2 * CONNECTIONS_PER_TURN
        left = intake.close()
        await asyncio.sleep(0)  # those of which connections are being made
        assert len(taken) + len(left) == 61  # whoever was accepted is told to the caller, who is not to lose it
        taken.extend(left)

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:
        address = listener.getsockname()
        flood, one = [("127.0.0.2", 0)] * 30, ("127.0.0.1", 0)
        connections = [
            opened.enter_context(socket.create_connection(address, source_address=source))
            for source in (*flood, one, *flood)
        ]
        other = connections[30]
        asyncio.run(accept_flood(listener, other))
    for connection in taken:
        connection.close()


def test_who_connects_to_ask_another_model_does_not_wait_for_hundreds_that_ask_a_flooded_one() -> None:
    taken: list[bytes] = []

    async def make_connection(accepted: socket.socket) -> None:
        taken.append(accepted.recv(100))
        accepted.close()

    async def accept_flood(listener: socket.socket) -> None:
        intake = ConnectionAcceptor([listener], make_connection, lambda beginning: beginning[:1])
        intake.accept_more()
        await asyncio.sleep(0)
        assert len(taken) == CONNECTIONS_PER_TURN and b"dear" in taken  # nothing of what was asked is lost
        while len(taken) < 61:
            await asyncio.sleep(0)
        intake.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:
        for text in (*[b"cheap"] * 30, b"dear", *[b"cheap"] * 30):
            client = opened.enter_context(socket.create_connection(listener.getsockname()))
            client.sendall(text)
        asyncio.run(accept_flood(listener))
    assert sorted(taken) == [b"cheap"] * 60 + [b"dear"]
