"""Connections of gRPC that one address has too many of, and what each has been sent.

grpcio bounds the connections of everybody together, and tells nobody whose they are. They are files of this process,
though: those beyond what an address may have are shut down, and grpcio closes them as if the client had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpuprof.serving.protocol.connection_files import ConnectionFiles
from gpuprof.serving.protocol.grpc_connection_bytes import Peer


class ConnectionLimit:
    """Shuts down connections to a port beyond those that an address may have: the newest.

    Attributes
    ----------
    turned_away : int
        Connections that were shut down.
    """

    def __init__(self, port: int, per_peer: int) -> None:
        self._per_peer = per_peer
        self._files = ConnectionFiles(port)
        self._admitted: set[Peer] = set()
        self.turned_away = 0

    def enforce(self) -> dict[Peer, int]:
        """Look through the connections; return how many bytes each that is admitted has received.

        Called from a thread: among thousands it takes a while.
        """
        received = self._files.look()
        counts = Counter(address for address, _ in self._admitted & set(received))
        for peer in received:
            if peer in self._admitted:
                continue
            if counts[peer[0]] < self._per_peer:
                counts[peer[0]] += 1
                self._admitted.add(peer)
            elif self._files.shut_down(peer):
                self.turned_away += 1
        self._admitted &= set(received)
        return {peer: received[peer] for peer in self._admitted}

    def shut_out(self, peers: Iterable[Peer]) -> list[Peer]:
        """Shut down the connections of these, as `enforce` last found them; return those that there were."""
        return [peer for peer in peers if self._files.shut_down(peer)]
