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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial

from gpuprof.machine.scheduling import shorten_wakeup_latency
from gpuprof.serving.listening import stop_listening
from gpuprof.serving.protocol.client_account import ClientAccount
from gpuprof.serving.protocol.peer_counts import find_client
from gpuprof.serving.protocol.relayed_connection import PIECE_BYTES, PendingConnection, Poller, RelayedConnection

#: What the router says, once, and what it is answered.
STOP, STOPPED = b"stop", "stopped"
#: Events of connections in a turn, and of those without the preface yet: each may be a TLS handshake, a millisecond.
_EVENTS, _NEW_EVENTS = 128, 4
_ACCEPTED_AT_ONCE = 16
_TICK_S = 0.1
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
        #: With when they must have sent the preface, and their addresses.
        self._pending: dict[PendingConnection, tuple[float, str]] = {}
        self._waiting_for_grpcio: list[PendingConnection] = []
        self._connections: dict[RelayedConnection, str] = {}
        self._turned_away = self._told = 0
        self._ends_by = 0.0
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
        while not self._ends_by or (self._connections and time.monotonic() < self._ends_by):
            is_busy = self._pending or self._connections or self._accounts
            self._poller.dispatch(_TICK_S if is_busy else None, _EVENTS)
            if (now := time.monotonic()) > ticked + _TICK_S:
                self._tick(now)
                ticked = now

    def _accept_from_now(self) -> None:
        for listener in self._listening:
            self._new_poller.watch(listener, 1, partial(self._accept, listener))

    def _dispatch_pending(self, _: int) -> None:
        self._new_poller.dispatch(0.0, _NEW_EVENTS)

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                client, address = listener.accept()
                self._admit(client, str(address[0]), int(address[1]))
        except BlockingIOError:
            pass
        except OSError:  # there are no files left: again after a tick
            self._new_poller.unwatch(listener)

    def _admit(self, client: socket.socket, host: str, port: int) -> None:
        key = find_client(host)
        account = self._accounts.get(key)
        count = len(self._pending) + len(self._connections)
        if count >= self._order.connections or (account and account.connections >= self._order.per_peer):
            client.close()
            self._turned_away += 1
            return
        if account is None:
            account = self._accounts[key] = ClientAccount(time.monotonic())
        account.connections += 1
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        pending = PendingConnection(self._new_poller, client, self._context, self._start_relaying, self._on_closed)
        self._pending[pending] = time.monotonic() + _HANDSHAKE_S, peer

    def _on_closed(self, pending: PendingConnection) -> None:
        _, peer = self._pending.pop(pending)
        self._count_off(peer)

    def _start_relaying(self, pending: PendingConnection) -> None:
        """Relay a client that has sent the preface and its settings."""
        _, peer = self._pending[pending]
        try:
            upstream = self._connect_upstream(peer)
        except BlockingIOError:  # more wait for grpcio than the system lets
            self._waiting_for_grpcio.append(pending)
            return
        except OSError:
            pending.close()
            return
        del self._pending[pending]
        account = self._accounts[_client_of(peer)]
        connection = RelayedConnection(self._poller, self._buffer, pending, upstream, account, self._forget)
        self._connections[connection] = peer

    def _connect_upstream(self, peer: str) -> socket.socket:
        """Return a connection to grpcio, which takes its name for the address of the client."""
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

    def _forget(self, connection: RelayedConnection) -> None:
        self._count_off(self._connections.pop(connection))

    def _count_off(self, peer: str) -> None:
        self._accounts[_client_of(peer)].connections -= 1

    def _hear_router(self, _: int) -> None:
        said = b""
        with suppress(ConnectionError):  # it has not read what it was told last
            said = self._router.recv(len(STOP))
        if said == STOP:
            for listener in self._listening:
                self._new_poller.unwatch(listener)
            for client in stop_listening(self._listening):
                with suppress(OSError):
                    host, port = client.getpeername()[:2]
                    self._admit(client, host, port)
            for listener in self._listening:
                listener.close()
            self._listening = []
            self._tell({STOPPED: True})
        else:
            self._poller.unwatch(self._router)
            self._ends_by = time.monotonic() + _LAST_S

    def _tick(self, now: float) -> None:
        """Do what is a matter of time."""
        for pending, (deadline, _) in list(self._pending.items()):
            if now < deadline:
                break
            pending.close()
        waiting, self._waiting_for_grpcio = self._waiting_for_grpcio, []
        for pending in waiting:
            if pending in self._pending:
                self._start_relaying(pending)
        for connection in list(self._connections):
            connection.check(now, self._order.stall_s)
        for client in [client for client, account in self._accounts.items() if account.is_needless(now)]:
            del self._accounts[client]
        self._accept_from_now()
        if self._turned_away != self._told:
            self._told = self._turned_away
            self._tell({"turned_away": self._turned_away})
        with suppress(OSError):  # where it runs is for the router to say
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

    def _tell(self, what: dict[str, object]) -> None:
        with suppress(OSError):
            self._router.send(json.dumps(what).encode())


def _client_of(peer: str) -> str:
    return find_client(peer.rpartition(":")[0].strip("[]"))


def _make_context(certificate: str, private_key: str) -> ssl.SSLContext:
    """Return what shows the certificate and speaks HTTP/2."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
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
