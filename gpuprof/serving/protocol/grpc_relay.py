"""The relay: a process between the clients of gRPC and the router, in which grpcio answers them.

    python -m gpuprof.serving.protocol.grpc_relay < ORDER

It accepts connections, so many of an address, ends their TLS and passes bytes on (`relayed_connection`): what costs
grpcio more than was sent does not get that far. A client's address is the name of the socket that it is relayed by. The
router keeps the listening sockets, so that nobody is refused while another relay takes the place of one that died. It
ends when the router goes, or wants it to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial

from gpuprof.machine.scheduling import shorten_wakeup_latency
from gpuprof.serving.listening import stop_listening
from gpuprof.serving.protocol.begun_question import BegunQuestion
from gpuprof.serving.protocol.call_turns import CallTurns
from gpuprof.serving.protocol.client_account import ClientAccount
from gpuprof.serving.protocol.connection_set import ConnectionSet
from gpuprof.serving.protocol.peer_counts import find_client
from gpuprof.serving.protocol.pending_connection import HTTP2, PendingConnection
from gpuprof.serving.protocol.poller import Poller
from gpuprof.serving.protocol.relayed_connection import PIECE_BYTES, RelayedConnection
from gpuprof.serving.watch.memory import return_free_memory

#: What the router says, the last once, and what it is answered.
PING, STOP = b"ping", b"stop"
ALIVE, STOPPED = "alive", "stopped"
#: What it is told beside: connections for which there was no room, and clients without HTTP/2, so far.
TURNED_AWAY, WITHOUT_HTTP2 = "turned_away", "without_http2"
#: Events of connections in a turn, of those without the preface yet, and TLS handshakes that begin, a millisecond each.
_EVENTS, _NEW_EVENTS, _HANDSHAKES = 128, 32, 4
_ACCEPTED_AT_ONCE = 16
_TICK_S = 0.1
#: So often the memory of connections that are gone is returned, some 50 KB of each with TLS.
_TRIM_S = 5.0
#: For what clients still have to be told when the router has gone.
_LAST_S = 5.0
_HANDSHAKE_S = 10.0
#: So much waits in the system for grpcio to read it: with the usual 200 KB both take turns at a tensor more often.
_SENT_AHEAD_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class RelayOrder:
    """What a relay is told when it starts."""

    listening: list[int]  #: Descriptors of the sockets that clients connect to.
    router: int  #: Descriptor of what it hears from the router by.
    upstream: int  #: Descriptor of the socket that grpcio listens on, as a file.
    connections: int  #: In all.
    per_peer: int  #: Of an address.
    stall_s: float  #: A client that does not read for so long is given up.
    certificate: str = field(default="", repr=False)  #: PEM; empty: no TLS.
    private_key: str = field(default="", repr=False)  #: PEM.

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


class Relay:
    """Accepts clients and relays them until the router has gone."""

    def __init__(self, order: RelayOrder) -> None:
        self._order = order
        self._context = _make_context(order.certificate, order.private_key) if order.certificate else None
        self._listening = [socket.socket(fileno=file) for file in order.listening]
        self._router = socket.socket(fileno=order.router)
        self._poller, self._new_poller = Poller(), Poller()
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._accounts: dict[str, ClientAccount] = {}
        self._connections = ConnectionSet[PendingConnection | RelayedConnection](order.per_peer, order.connections)
        self._pending: dict[PendingConnection, None] = {}
        #: Whose TLS can begin, by address: these have turns.
        self._hellos: dict[str, deque[PendingConnection]] = {}
        self._waiting_for_grpcio: list[PendingConnection] = []
        connect = partial(self._connect_upstream, "relay", 0)
        self._question = BegunQuestion(self._poller, connect, self._note_begun)
        self._turns = CallTurns(self._question.ask)
        self._relayed: set[RelayedConnection] = set()
        self._most = self._without_http2 = 0
        self._told = (0, 0)
        self._ends_by = self._trimmed = 0.0
        #: Tells names apart that the same client has one after another, and those of other servers.
        self._mark, self._count = os.urandom(6).hex(), 0

    def run(self) -> None:
        """Relay until the router has gone and clients have been told what it said last."""
        for end in (*self._listening, self._router):
            end.setblocking(False)
        self._poller.watch(self._new_poller, 1, self._dispatch_pending)
        self._poller.watch(self._router, 1, self._hear_router)
        self._accept_from_now()
        ticked = 0.0
        while not self._ends_by or (self._relayed and time.monotonic() < self._ends_by):
            is_busy = self._connections or self._accounts or self._most or self._told != self._count_refused()
            self._poller.dispatch(0.0 if self._hellos else _TICK_S if is_busy else None, _EVENTS)
            self._turns.give_turns()
            self._begin_handshakes()
            if (now := time.monotonic()) > ticked + _TICK_S:
                self._tick(now)
                ticked = now

    def _note_begun(self) -> None:
        self._turns.note_answer()

    def _accept_from_now(self) -> None:
        for listener in self._listening:
            self._new_poller.watch(listener, 1, partial(self._accept, listener))

    def _dispatch_pending(self, _: int) -> None:
        self._new_poller.dispatch(0.0, _NEW_EVENTS)

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                client, address = listener.accept()
                self._admit(client, str(address[0]))
        except BlockingIOError:
            pass
        except OSError:  # there are no files left: again after a tick
            self._new_poller.unwatch(listener)

    def _admit(self, client: socket.socket, host: str) -> None:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = PendingConnection(
            self._new_poller,
            client,
            find_client(host),
            self._context,
            self._take_hello,
            self._start_relaying,
            self._forget,
        )
        self._pending[pending] = None
        if not self._connections.add(pending, pending.touched):
            pending.abort()

    def _take_hello(self, pending: PendingConnection) -> None:
        self._hellos.setdefault(pending.peer, deque()).append(pending)

    def _begin_handshakes(self) -> None:
        """Begin a few handshakes, of each address in turn one of its newest or oldest."""
        began = 0
        while self._hellos and began < _HANDSHAKES:
            peer = next(iter(self._hellos))
            waiting = self._hellos.pop(peer)
            pending = waiting.pop() if len(waiting) % 2 else waiting.popleft()
            if waiting:
                self._hellos[peer] = waiting
            if pending in self._pending:  # else it was given up meanwhile
                pending.begin_tls()
                began += 1

    def _forget(self, connection: PendingConnection | RelayedConnection) -> None:
        self._connections.discard(connection)
        if isinstance(connection, PendingConnection):
            self._pending.pop(connection, None)
            self._without_http2 += connection.lacks_http2
        else:
            self._relayed.discard(connection)

    def _start_relaying(self, pending: PendingConnection) -> None:
        """Relay a client that has sent the preface and its settings."""
        try:
            upstream = self._connect_upstream(*pending.client.getpeername()[:2])
        except BlockingIOError:  # more wait for grpcio than the system lets
            self._waiting_for_grpcio.append(pending)
            return
        except OSError:
            pending.abort()
            return
        self._forget(pending)
        now = time.monotonic()
        account = self._accounts.setdefault(pending.peer, ClientAccount(now))
        connection = RelayedConnection(
            self._poller, self._buffer, pending, upstream, account, self._turns, self._forget
        )
        self._relayed.add(connection)
        self._connections.add(connection, now)

    def _connect_upstream(self, host: str, port: int) -> socket.socket:
        """Return a connection to grpcio, which takes its name for the address of the client."""
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.setblocking(False)
            upstream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_AHEAD_BYTES)
            self._count += 1
            upstream.bind(f"\0{peer}.{self._mark}{self._count:x}")
            # The file has no name any more: nobody else can connect to it.
            upstream.connect(f"/proc/self/fd/{self._order.upstream}")
        except OSError:
            upstream.close()
            raise
        return upstream

    def _hear_router(self, _: int) -> None:
        said = b""
        with suppress(ConnectionError):  # it has not read what it was told last
            said = self._router.recv(len(STOP))
        if said == PING:
            self._tell({ALIVE: True})
        elif said == STOP:
            for listener in self._listening:
                self._new_poller.unwatch(listener)
            for client in stop_listening(self._listening):
                with suppress(OSError):
                    self._admit(client, client.getpeername()[0])
            for listener in self._listening:
                listener.close()
            self._listening = []
            self._tell({STOPPED: True})
        else:
            self._poller.unwatch(self._router)
            self._ends_by = time.monotonic() + _LAST_S

    def _tick(self, now: float) -> None:
        """Do what is a matter of time."""
        for pending in list(self._pending):
            if now < pending.touched + _HANDSHAKE_S:
                break
            pending.abort()
        waiting, self._waiting_for_grpcio = self._waiting_for_grpcio, []
        for pending in waiting:
            if pending in self._pending:
                self._start_relaying(pending)
        self._question.check(now)
        for connection in list(self._relayed):
            connection.check(now, self._order.stall_s)
        for client in [client for client, account in self._accounts.items() if account.is_needless(now)]:
            if not self._connections.has(client):
                del self._accounts[client]
        self._accept_from_now()
        self._return_memory(now)
        if (counts := self._count_refused()) != self._told:
            self._told = counts
            self._tell({TURNED_AWAY: counts[0], WITHOUT_HTTP2: counts[1]})
        with suppress(OSError):  # where it runs is for the router to say
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

    def _count_refused(self) -> tuple[int, int]:
        """Return how many connections found no room, and how many clients offered no HTTP/2."""
        return self._connections.turned_away, self._without_http2

    def _return_memory(self, now: float) -> None:
        """Have the C library return what connections had that are gone, where half of them are."""
        self._most = max(self._most, len(self._connections))
        if now > self._trimmed + _TRIM_S and 2 * len(self._connections) < self._most:
            self._trimmed, self._most = now, len(self._connections)
            return_free_memory()

    def _tell(self, what: dict[str, object]) -> None:
        with suppress(OSError):
            self._router.send(json.dumps(what).encode())


def _make_context(certificate: str, private_key: str) -> ssl.SSLContext:
    """Return what shows the certificate and speaks HTTP/2."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols([HTTP2])
    context.options |= ssl.OP_NO_RENEGOTIATION
    files = [os.memfd_create("pem") for _ in range(2)]  # it is read from files only
    for file, text in zip(files, (certificate, private_key), strict=True):
        os.write(file, text.encode())
    context.load_cert_chain(*(f"/proc/self/fd/{file}" for file in files))
    for file in files:
        os.close(file)
    return context


def main() -> int:
    """Relay until the router has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first
        signal.signal(ignored, signal.SIG_IGN)
    shorten_wakeup_latency()
    Relay(RelayOrder(**json.loads(sys.stdin.read()))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
