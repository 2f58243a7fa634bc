"""The connections that are open, of which one address may have only so many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuprof.serving.protocol.peer_counts import PeerCounts

if TYPE_CHECKING:
    from gpuprof.serving.protocol.http_connection import HttpConnection


class ConnectionSet:
    """The connections that are open, of which one address may have only so many."""

    def __init__(self, per_peer: int) -> None:
        self._connections: set[HttpConnection] = set()
        self._counts = PeerCounts(per_peer)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter(list(self._connections))

    @property
    def turned_away(self) -> int:
        """How many connections there would have been more."""
        return self._counts.turned_away

    def add(self, connection: HttpConnection) -> bool:
        """Take in a connection; False when its address has too many."""
        if not self._counts.add(connection.peer):
            return False
        self._connections.add(connection)
        return True

    def discard(self, connection: HttpConnection) -> None:
        """Forget a connection."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._counts.discard(connection.peer)
