"""The connections that are open: so many in all and so many of a client, and which one makes room for another."""

from __future__ import annotations

import resource
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

#: Of HTTP, in all, where the system lets the process have twice as many files.
_MOST_CONNECTIONS = 16_384
#: Connections of a client that are looked at to find one that makes room; the others come next.
_EXAMINED = 64


class PeerConnection(Hashable, Protocol):
    """What is known of a connection here."""

    @property
    def peer(self) -> str:
        """Whose it is, as `find_client` says."""
        ...

    @property
    def touched(self) -> float:
        """When bytes last moved on it, nearly; monotonic seconds."""
        ...

    def is_idle_at(self, now: float) -> bool:
        """Return whether its client has asked nothing for a while, or has not gone on with what it began."""
        ...

    def is_unfinished_at(self, now: float) -> bool:
        """Return whether its client has begun a request a while ago of which more is to come."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=PeerConnection)


class ConnectionSet(Generic[ConnectionT]):
    """The connections that are open: so many in all and so many of a client.

    A client that has as many as it may gets another one where one of its own is idle, or has a request that does not
    become whole: that is closed. When there are too many in all, the client that has most gives one up, an idle one
    rather than one in use. So nobody keeps others out by holding connections, whoever they are. Which one has been idle
    longest is looked for among some of them.

    Parameters
    ----------
    per_peer : int
        That a client may have: an address, of IPv6 a network.
    most : int
        That there may be.

    Attributes
    ----------
    turned_away : int
        Connections that were refused or closed for want of room.
    """

    def __init__(self, per_peer: int, most: int) -> None:
        self._per_peer, self._most = per_peer, most
        #: Those of each client, and the clients by how many they have.
        self._connections: dict[str, dict[ConnectionT, None]] = {}
        self._clients: dict[int, dict[str, None]] = {}
        self._count = self._largest = 0
        self.turned_away = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ConnectionT]:
        return iter([connection for own in self._connections.values() for connection in own])

    def has(self, client: str) -> bool:
        """Return whether a client has any."""
        return client in self._connections

    def add(self, connection: ConnectionT, now: float) -> bool:
        """Add a connection, in the place of another one where there is no room; False when no other makes room."""
        client = connection.peer
        count = len(self._connections.get(client, ()))
        if count >= self._per_peer or self._count >= self._most:
            self.turned_away += 1
            other = self._find_dispensable(client, count, now)
            if other is None:
                return False
            self.discard(other)
            other.abort()
        own = self._connections.setdefault(client, {})
        own[connection] = None
        self._count += 1
        self._move(client, len(own) - 1, len(own))
        return True

    def discard(self, connection: ConnectionT) -> None:
        """Forget a connection."""
        client = connection.peer
        own = self._connections.get(client, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            self._move(client, len(own) + 1, len(own))
            if not own:
                del self._connections[client]

    def _find_dispensable(self, client: str, count: int, now: float) -> ConnectionT | None:
        """Return the connection that makes room for another of a client that has so many."""
        if count >= self._per_peer:
            return self._find_idlest(client, now)
        holder = next(iter(self._clients[self._largest]))
        # One that has hardly more than the client keeps what it uses.
        return self._find_idlest(holder, now, or_busy=self._largest > count + 1)

    def _find_idlest(self, client: str, now: float, or_busy: bool = False) -> ConnectionT | None:
        own = self._connections[client]
        examined = list(islice(own, _EXAMINED))
        for connection in examined:
            del own[connection]
            own[connection] = None
        idle = [connection for connection in examined if connection.is_idle_at(now)]
        candidates = idle or [connection for connection in examined if or_busy or connection.is_unfinished_at(now)]
        return min(candidates, key=lambda connection: connection.touched, default=None)

    def _move(self, client: str, before: int, after: int) -> None:
        """Enter a client under how many connections it has now."""
        if before:
            del self._clients[before][client]
            if not self._clients[before]:
                del self._clients[before]
        if after:
            self._clients.setdefault(after, {})[client] = None
        self._largest = after if after > self._largest or self._largest not in self._clients else self._largest


def find_most_connections() -> int:
    """Return how many connections of HTTP there may be in all."""
    return min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
