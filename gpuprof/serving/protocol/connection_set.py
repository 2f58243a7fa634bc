"""The connections that are open, of which one address may have only so many."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from gpuprof.serving.protocol.peer_counts import PeerCounts


class PeerConnection(Hashable, Protocol):
    """What is known of a connection here: the address at its other end."""

    peer: str


ConnectionT = TypeVar("ConnectionT", bound=PeerConnection)


class ConnectionSet(Generic[ConnectionT]):
    """The connections that are open, of which one address may have only so many."""

    def __init__(self, per_peer: int) -> None:
        self._connections: set[ConnectionT] = set()
        self._counts = PeerCounts(per_peer)

    def __iter__(self) -> Iterator[ConnectionT]:
        return iter(list(self._connections))

    @property
    def turned_away(self) -> int:
        """Connections refused because their address had too many."""
        return self._counts.turned_away

    def add(self, connection: ConnectionT) -> bool:
        """Add a connection; False when its address has too many."""
        if not self._counts.add(connection.peer):
            return False
        self._connections.add(connection)
        return True

    def discard(self, connection: ConnectionT) -> None:
        """Forget a connection."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._counts.discard(connection.peer)
