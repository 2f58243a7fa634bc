from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprof.serving.listening import ConnectionIntake, stop_listening
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


@pytest.fixture
def many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


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
            assert eventually(lambda: _unaccepted(server.port) == count), _unaccepted(server.port)
        finally:
            server.process.send_signal(signal.SIGCONT)
            for client in clients:
                client.close()


def _unaccepted(port: int) -> int:
    """Return how many connections wait to be accepted: of a socket that listens the kernel tells it as rx_queue."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return next(int(row[4].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}"))


def test_more_than_one_connection_is_accepted_in_a_turn_of_the_loop() -> None:
    taken: list[socket.socket] = []

    async def take_in(accepted: socket.socket) -> None:
        taken.append(accepted)
        if len(taken) == 2:
            raise ConnectionResetError  # who has gone meanwhile keeps nobody out

    async def accept_twice(listener: socket.socket, clients: list[socket.socket]) -> None:
        intake = ConnectionIntake([listener], take_in)
        intake.accept_more()
        await asyncio.sleep(0)
        assert {one.getpeername() for one in taken} == {client.getsockname() for client in clients}
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
