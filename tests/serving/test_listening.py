from __future__ import annotations

import socket

import pytest

from gpuprof.serving.listening import stop_listening
from tests.reruns import serves_in_real_time

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
