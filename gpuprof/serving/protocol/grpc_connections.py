"""Connections of gRPC that one address has too many of, and what each has been sent.

grpcio bounds the connections of everybody together, and tells nobody whose they are. They are files of this process,
though: those beyond what an address may have are shut down, and grpcio closes them as if the client had.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpuprof.serving.protocol.grpc_connection_bytes import Peer

#: `tcpi_bytes_received` of the system's ``struct tcp_info`` (linux/tcp.h), 64 bits.
_RECEIVED = slice(128, 136)
#: How an IPv4 address appears at a socket of IPv6 (RFC 4291, 2.5.5.2).
_MAPPED = "::ffff:"


class ConnectionLimit:
    """Shuts down connections to a port beyond those that an address may have: the newest.

    Attributes
    ----------
    turned_away : int
        Connections that were shut down.
    """

    def __init__(self, port: int, per_peer: int) -> None:
        self._port = port
        self._per_peer = per_peer
        self._found: dict[Peer, int] = {}
        self._admitted: set[Peer] = set()
        self.turned_away = 0

    def enforce(self) -> dict[Peer, int]:
        """Look through the connections; return how many bytes each that is admitted has received.

        Called from a thread: among thousands it takes a while.
        """
        descriptors: dict[Peer, int] = {}
        received: dict[Peer, int] = {}
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if (one := self._look_at(int(file.name))) is not None:
                    peer, count = one
                    descriptors[peer], received[peer] = int(file.name), count
        counts = Counter(address for address, _ in self._admitted & set(descriptors))
        for peer, file_number in descriptors.items():
            if peer in self._admitted:
                continue
            if counts[peer[0]] < self._per_peer:
                counts[peer[0]] += 1
                self._admitted.add(peer)
            elif _shut_down(file_number, peer):
                self.turned_away += 1
        self._admitted &= set(descriptors)
        self._found = descriptors
        return {peer: received[peer] for peer in self._admitted}

    def shut_out(self, peers: Iterable[Peer]) -> int:
        """Shut down the connections of these, as `enforce` last found them; return how many there were."""
        return sum(_shut_down(self._found[peer], peer) for peer in peers if peer in self._found)

    def _look_at(self, file: int) -> tuple[Peer, int] | None:
        """Return who is at the other end of a file that is a connection to the port, and what came from there."""
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return None
        with _copy(file) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
                return None
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
            return _peer_of(connection), int.from_bytes(told[_RECEIVED], sys.byteorder)


def _peer_of(connection: socket.socket) -> Peer:
    address, port = connection.getpeername()[:2]
    return address.removeprefix(_MAPPED).partition("%")[0], port


def _shut_down(file: int, peer: Peer) -> bool:
    """Shut a connection down unless its file has become another's meanwhile."""
    with suppress(OSError), _copy(file) as connection:
        if _peer_of(connection) == peer:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _copy(file: int) -> socket.socket:
    """Return the socket of a file; it has a file of its own, so that closing it closes nothing of grpcio's."""
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
