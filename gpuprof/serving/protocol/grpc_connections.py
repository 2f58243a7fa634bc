"""Connections of gRPC that one address has too many of.

grpcio bounds the connections of everybody together, and tells nobody whose they are. They are files of this process,
though: those beyond what an address may have are shut down, and grpcio closes them as if the client had.
"""

from __future__ import annotations

import os
import socket
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path

#: Address and port of a client.
_Peer = tuple[str, int]


class ConnectionLimit:
    """Shuts down connections to a port beyond those that an address may have: the newest.

    Parameters
    ----------
    port : int
    per_peer : int

    Attributes
    ----------
    turned_away : int
        Connections that were shut down.
    """

    def __init__(self, port: int, per_peer: int) -> None:
        self._port = port
        self._per_peer = per_peer
        self._admitted: set[_Peer] = set()
        self.turned_away = 0

    def enforce(self) -> None:
        """Look through the connections, where the process has more files than an address may have connections.

        Called from a thread: among thousands it takes a while.
        """
        files = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
        if len(files) <= self._per_peer:
            self._admitted.clear()
            return
        found: dict[_Peer, int] = {}
        for file in files:
            with suppress(OSError):
                if (peer := self._peer_of(file)) is not None:
                    found[peer] = file
        counts = Counter(address for address, _ in self._admitted & set(found))
        for peer, file in found.items():
            if peer in self._admitted:
                continue
            if counts[peer[0]] < self._per_peer:
                counts[peer[0]] += 1
                self._admitted.add(peer)
            elif _shut_down(file, peer):
                self.turned_away += 1
        self._admitted &= set(found)

    def _peer_of(self, file: int) -> _Peer | None:
        """Return who is at the other end of a file that is a connection to the port."""
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return None
        with _copy(file) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
                return None
            address, port = connection.getpeername()[:2]
            return address, port


def _shut_down(file: int, peer: _Peer) -> bool:
    """Shut a connection down unless its file has become another's meanwhile."""
    with suppress(OSError), _copy(file) as connection:
        if connection.getpeername()[:2] == peer:
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
