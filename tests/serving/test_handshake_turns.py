"""Who begins TLS and does not go on keeps nobody out, not even behind the same address."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme

from gpuprof.serving import handshake_turns
from gpuprof.serving.handshake_turns import HandshakeTurns
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, replica, running

pytestmark = serves_in_real_time

HELLO = b"\x16\x03\x01\x00\x04abcd"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def accept(listener: socket.socket, opened: ExitStack, sent: bytes, host: str = "127.0.0.1") -> socket.socket:
    client = opened.enter_context(socket.create_connection(listener.getsockname(), source_address=(host, 0)))
    client.sendall(sent)
    accepted = opened.enter_context(listener.accept()[0])
    accepted.setblocking(False)
    return accepted


class Handshakes:
    """Handshakes that go on until they are told to end."""

    def __init__(self, at_once: int = 2, most_pending: int = 100) -> None:
        self.begun: list[socket.socket] = []
        self.ended = asyncio.Event()
        self.turns = HandshakeTurns(self._connect, at_once, most_pending)

    async def _connect(self, accepted: socket.socket) -> None:
        self.begun.append(accepted)
        await self.ended.wait()

    def start(self, accepted: socket.socket) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.turns.shake_hands(accepted))

    async def have_begun(self, count: int) -> None:
        async with asyncio.timeout(60.0):
            while len(self.begun) < count:
                await asyncio.sleep(0.005)


def test_a_client_has_a_few_handshakes_at_a_time_and_others_need_not_wait_for_them(listener: socket.socket) -> None:
    async def main() -> None:
        one = Handshakes()
        with ExitStack() as opened:
            sockets = [accept(listener, opened, HELLO) for _ in range(5)]
            tasks = [one.start(accepted) for accepted in sockets]
            await one.have_begun(2)
            other = accept(listener, opened, HELLO, "127.0.0.2")
            tasks.append(one.start(other))
            await one.have_begun(3)
            assert set(one.begun) == {*sockets[:2], other}
            one.ended.set()
            await asyncio.gather(*tasks)
            assert one.begun[3:] == [sockets[4], sockets[2], sockets[3]]  # newest and oldest alternately
        assert not one.turns._clients and not len(one.turns._pending)

    asyncio.run(main())


def test_who_waits_with_half_a_hello_takes_no_turn(listener: socket.socket) -> None:
    async def main() -> None:
        one = Handshakes()
        with ExitStack() as opened:
            halves = [one.start(accept(listener, opened, HELLO[:-1])) for _ in range(20)]
            whole = accept(listener, opened, HELLO)
            task = one.start(whole)
            await one.have_begun(1)
            assert one.begun == [whole]
            one.ended.set()
            await task
            for half in halves:
                half.cancel()
            await asyncio.wait(halves)
        assert not one.turns._clients and not len(one.turns._pending)

    asyncio.run(main())


def test_a_handshake_that_does_not_go_on_is_given_up_where_others_of_its_client_wait(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_turns, "_CONTENDED_S", 0.05)

    async def main() -> None:
        one = Handshakes()
        with ExitStack() as opened:
            stalled = [one.start(accept(listener, opened, HELLO)) for _ in range(2)]
            await one.have_begun(2)
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in stalled)  # nobody waits
            last = one.start(accept(listener, opened, HELLO))
            await one.have_begun(3)
            await asyncio.wait(stalled, return_when=asyncio.FIRST_COMPLETED)
            assert stalled[0].done() and isinstance(stalled[0].exception(), OSError) and not stalled[1].done()
            one.ended.set()
            await asyncio.gather(stalled[1], last)
        assert not one.turns._clients

    asyncio.run(main())


def test_the_more_wait_the_sooner_a_handshake_that_does_not_go_on_is_given_up() -> None:
    async def main() -> None:
        turns, limits = handshake_turns._ClientTurns(2), [asyncio.Timeout(None) for _ in range(2)]
        waiting: list[asyncio.Task[None]] = []
        async with limits[0], limits[1]:
            for limit in limits:
                await turns.wait()
                limit.reschedule(asyncio.get_running_loop().time() + 10.0)
                turns.begin(limit)
            left_s = []
            for count in (1, 2, 4, 40):
                waiting += [asyncio.ensure_future(turns.wait()) for _ in range(count - len(waiting))]
                await asyncio.sleep(0)
                left_s.append([round((limit.when() or 0.0) - began, 2) for limit, began in turns._begun.items()])
        assert left_s == [[2.0, 10.0], [1.0, 1.0], [0.67, 0.67], [0.3, 0.3]]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

    asyncio.run(main())


def test_of_too_many_that_wait_the_oldest_makes_room_and_a_cancelled_one_leaves_its_turn(
    listener: socket.socket,
) -> None:
    async def main() -> None:
        one = Handshakes(at_once=1, most_pending=3)
        with ExitStack() as opened:
            tasks = [one.start(accept(listener, opened, HELLO))]
            await one.have_begun(1)
            tasks += [one.start(accept(listener, opened, sent)) for sent in (b"", HELLO, HELLO)]
            await asyncio.wait(tasks[1:2])
            assert isinstance(tasks[1].exception(), ConnectionError) and one.turns.turned_away == 1
            tasks += [one.start(accept(listener, opened, HELLO))]
            await asyncio.wait(tasks[2:3])
            assert isinstance(tasks[2].exception(), ConnectionError) and one.turns.turned_away == 2
            tasks[0].cancel()
            tasks[4].cancel()
            await one.have_begun(2)
            one.ended.set()
            await tasks[3]
            await asyncio.wait(tasks)
        assert tasks[0].cancelled() and tasks[4].cancelled()
        assert not one.turns._clients and not len(one.turns._pending)

    asyncio.run(main())


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[RunningServer]:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    (tmp_path / "both.pem").chmod(0o600)
    options = ["--tls-cert", str(tmp_path / "both.pem"), "--tls-key", str(tmp_path / "both.pem")]
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")]), *options) as server:
        server.context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        yield server


def whole_hello() -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begun = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), begun).do_handshake()
    return begun.read()


@pytest.mark.parametrize(
    ("sent", "host", "count"),
    [
        ("nothing", "127.0.0.1", 2200),
        ("half a hello", "127.0.0.1", 2200),
        ("half a hello", "127.0.0.2", 2200),
        ("a hello", "127.0.0.2", 2200),
        ("a hello", "127.0.0.1", 2200),
    ],
)
def test_clients_that_begin_tls_and_do_not_go_on_keep_nobody_out(
    secured: RunningServer, many_files: None, sent: str, host: str, count: int
) -> None:
    hello = {"nothing": b"", "half a hello": whole_hello()[:100], "a hello": whole_hello()}[sent]
    with ExitStack() as opened:
        for _ in range(count):
            silent = socket.create_connection(("127.0.0.1", secured.port), source_address=(host, 0))
            opened.enter_context(silent)
            if hello:
                silent.sendall(hello)
        for _ in range(3):
            assert secured.infer("m", [1.0])[0] == 200
        refused = b"\ngpuprof_refused_connections_total 0.0"
        assert count < 2048 or eventually(lambda: refused not in secured.get("/metrics")[1])


def test_hundreds_that_connect_at_once_are_all_answered(secured: RunningServer, many_files: None) -> None:
    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", secured.port, ssl=secured.context)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer[:12]

    async def ask_all() -> list[bytes]:
        return await asyncio.gather(*(ask() for _ in range(400)))

    assert set(asyncio.run(ask_all())) == {b"HTTP/1.1 200"}


def test_clients_that_go_at_once_before_they_said_anything_end_a_few_in_a_turn_and_leave_no_garbage(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_turns, "_WOKEN_AT_ONCE", 4)

    async def main() -> None:
        one = Handshakes(most_pending=200)
        with ExitStack() as opened:
            clients = [opened.enter_context(socket.create_connection(listener.getsockname())) for _ in range(40)]
            accepted = [opened.enter_context(listener.accept()[0]) for _ in clients]
            for each in accepted:
                each.setblocking(False)
            tasks = [asyncio.ensure_future(hear_refusal(one, each)) for each in accepted]
            await asyncio.sleep(0.05)
            gc.collect()
            gc.disable()
            for client in clients:
                client.close()
            done, turns = 0, []
            async with asyncio.timeout(60.0):
                while done < len(tasks):
                    await asyncio.sleep(0)
                    turns.append(sum(task.done() for task in tasks) - done)
                    done += turns[-1]
            assert max(turns) <= 4
            assert not one.begun and not len(one.turns._pending)
            tasks.clear()
            left = [found for found in collect_garbage() if isinstance(found, ConnectionAbortedError)]
            assert not left, "exceptions keep their tracebacks, and so the frames that keep them"

    try:
        asyncio.run(main())
    finally:
        gc.enable()


async def hear_refusal(one: Handshakes, accepted: socket.socket) -> None:
    with suppress(ConnectionAbortedError):
        await one.turns.shake_hands(accepted)


def collect_garbage() -> list[object]:
    """Return what is left in cycles."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
