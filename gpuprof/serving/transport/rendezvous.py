"""The socket at which machines and workers connect to the router: local, or TCP for other machines.

Each peer sends its name and a secret that only the router and the processes started for it have. By TCP the connection
is encrypted where the rendezvous has a certificate, and the peer accepts no other certificate.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import ssl
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gpuprof.serving.transport.wire import CHUNK_BYTES, BlockingStream, Frame, FrameConnection, FrameKind, FrameReceiver

#: A peer must authenticate within this time.
_GREETING_S = 20.0


@dataclass(frozen=True, slots=True)
class RendezvousKey:
    """Credentials with which a machine or a worker is admitted."""

    address: str  #: ``"unix:NAME"``, an abstract name outside the file system, or ``"tcp:HOST:PORT"``.
    secret: str  #: Hexadecimal.
    certificate: str = ""  #: Certificate of the rendezvous, PEM; empty: the connection is not encrypted.

    def to_json(self) -> str:
        """Return the key as JSON."""
        return json.dumps(asdict(self))

    def make_hello(self, peer: str, description: dict[str, Any]) -> dict[str, Any]:
        """Return the greeting of the peer of this name, with its description of itself."""
        return {**description, "who": peer, "secret": self.secret}

    def context(self) -> ssl.SSLContext | None:
        """Return a TLS context that accepts only the rendezvous's certificate; None without a certificate."""
        if not self.certificate:
            return None
        context = ssl.create_default_context(cadata=self.certificate)
        context.check_hostname = False  # the certificate itself is compared, regardless of its host name
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


class ExpectedPeer(FrameReceiver, Protocol):
    """A peer expected by the rendezvous: the router's link to a machine or a worker."""

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        """Accept a connection with the other side's description of itself."""


class Rendezvous:
    """Admits expected peers, by a shared secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex()
        self._peers: dict[str, ExpectedPeer] = {}
        self._listeners: list[asyncio.AbstractServer] = []

    async def open_local(self) -> RendezvousKey:
        """Listen for processes of this machine only."""
        # In the abstract namespace (unix(7)) no file is left when the router is killed. But any process may connect, so
        # every peer must have the secret.
        name = f"gpuprof-{secrets.token_hex(8)}"
        server = await asyncio.get_running_loop().create_unix_server(self._make_connection, f"\0{name}", backlog=1024)
        self._listeners.append(server)
        return RendezvousKey(f"unix:{name}", self._secret)

    async def open_remote(
        self, host: str, context: ssl.SSLContext | None = None, certificate: str = ""
    ) -> RendezvousKey:
        """Listen on any free port of ``host``, with ``certificate`` where ``context`` has it loaded.

        Raises `OSError` when listening is impossible there.
        """
        server = await asyncio.get_running_loop().create_server(
            self._make_connection, host, 0, ssl=context, backlog=1024
        )
        self._listeners.append(server)
        port = server.sockets[0].getsockname()[1]
        return RendezvousKey(f"tcp:{host}:{port}", self._secret, certificate)

    def expect(self, name: str, peer: ExpectedPeer) -> None:
        """Admit the peer ``name``, as often as it connects."""
        self._peers[name] = peer

    def forget(self, name: str) -> None:
        """Stop admitting the peer."""
        self._peers.pop(name, None)

    def close(self) -> None:
        """Stop admitting peers; connected peers stay."""
        for server in self._listeners:
            server.close()

    def admit(self, connection: FrameConnection, hello: object) -> bool:
        """Pass a connection to the link that expects it, if its secret is right."""
        if not isinstance(hello, dict) or not all(isinstance(hello.get(key), str) for key in ("who", "secret")):
            return False
        peer = self._peers.get(hello["who"])
        # In constant time: comparing letter by letter would reveal the number of matching letters.
        if not hmac.compare_digest(hello["secret"].encode(), self._secret.encode()) or peer is None:
            return False
        connection.trust()
        connection.receiver = peer
        peer.on_join(connection, hello)
        return True

    def _make_connection(self) -> FrameConnection:
        unknown = _UnknownPeer(self)
        return unknown.connection


class _UnknownPeer:
    """A peer that has not identified itself yet, and must do so in time."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.connection = FrameConnection(self, CHUNK_BYTES)
        self._rendezvous = rendezvous
        self._patience = asyncio.get_running_loop().call_later(_GREETING_S, self.connection.abort)

    def receive(self, frame: Frame) -> None:
        """Admit an expected peer; close the connection of any other."""
        self._patience.cancel()
        if frame.kind != FrameKind.HELLO or not self._rendezvous.admit(self.connection, frame.head):
            self.connection.abort()

    def on_close(self) -> None:
        """Stop waiting for the greeting."""
        self._patience.cancel()


def join_rendezvous(key: RendezvousKey, peer: str, hello: dict[str, Any]) -> BlockingStream:
    """Connect to the rendezvous as ``peer``, with the additional description ``hello``; return the connection.

    Raises `OSError` when the rendezvous does not answer.
    """
    stream = BlockingStream(_open_socket(key))
    stream.send(FrameKind.HELLO, key.make_hello(peer, hello))
    return stream


async def connect(key: RendezvousKey, connection: FrameConnection) -> None:
    """Connect ``connection`` to the rendezvous.

    Raises `OSError` when the rendezvous does not answer.
    """
    loop = asyncio.get_running_loop()
    kind, _, where = key.address.partition(":")
    if kind == "unix":
        await loop.create_unix_connection(lambda: connection, f"\0{where}")
    else:
        host, _, port = where.rpartition(":")
        await loop.create_connection(lambda: connection, host, int(port), ssl=key.context())


def _open_socket(key: RendezvousKey) -> socket.socket:
    kind, _, where = key.address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"\0{where}")
        return connection
    host, _, port = where.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=_GREETING_S)
    # Frames are small and wait for answers: they must not be held back to be sent together.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The system probes the other machine after silence, and ends a dead connection after half a minute.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    context = key.context()
    return connection if context is None else context.wrap_socket(connection)
