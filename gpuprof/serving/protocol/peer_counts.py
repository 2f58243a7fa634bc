"""How much of something each client has: connections, calls."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

#: Of an address of IPv6, the part that is a client's: whoever has one address has all that begin so.
_NETWORK_BITS = 64


class PeerCounts:
    """Lets one client have only so many: an address, of IPv6 the network of 64 bits that it is in.

    Nobody may have more than what is left of all: so however many clients take what they can, another finds as much.

    Parameters
    ----------
    per_peer : int
    most : int
        Of all clients.

    Attributes
    ----------
    turned_away : int
        How often a client had too many.

    Examples
    --------
    >>> calls = PeerCounts(1)
    >>> calls.add("10.0.0.1"), calls.add("10.0.0.1"), calls.add("10.0.0.2")
    (True, False, True)
    >>> calls.discard("10.0.0.1")
    >>> calls.add("10.0.0.1")
    True
    """

    def __init__(self, per_peer: int, most: int = 1 << 31) -> None:
        self.per_peer = per_peer
        self._most = self._left = most
        self.turned_away = 0
        self._counts: dict[str, int] = {}

    def add(self, peer: str) -> bool:
        """Count one more; False, and nothing counted, when the client has too many."""
        client = find_client(peer)
        count = self._counts.get(client, 0)
        if count >= min(self.per_peer, self._left):
            self.turned_away += 1
            return False
        self._counts[client] = count + 1
        self._left -= 1
        return True

    @property
    def clients(self) -> int:
        """How many clients have any."""
        return len(self._counts)

    def __len__(self) -> int:
        """Return how much all clients have together."""
        return self._most - self._left

    def has(self, peer: str) -> bool:
        """Return whether the client has any."""
        return find_client(peer) in self._counts

    def discard(self, peer: str) -> None:
        """Count one less."""
        client = find_client(peer)
        self._left += 1
        left = self._counts[client] - 1
        if left:
            self._counts[client] = left
        else:
            del self._counts[client]


def find_client(peer: str) -> str:
    """Return what is taken for one client: an address of IPv4, a network of IPv6, or what is neither as it is.

    >>> find_client("10.0.0.1"), find_client("2001:db8::7"), find_client("::ffff:10.0.0.1")
    ('10.0.0.1', '2001:db8::', '10.0.0.1')
    """
    return peer if ":" not in peer else _find_network(peer)


def peer_of(context: Any) -> str:
    """Return the client of a call of gRPC, as `find_client` says: ``127.0.0.1`` of ``ipv4:127.0.0.1:50412``."""
    return _find_peer(context.peer())


@lru_cache(4096)
def _find_peer(uri: str) -> str:
    return find_client(unquote(uri).partition(":")[2].rpartition(":")[0].strip("[]"))


@lru_cache(4096)
def _find_network(peer: str) -> str:
    try:
        address = ipaddress.IPv6Address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:  # the hosts of one link, each a client of its own, have the same network
        return peer
    return str(ipaddress.IPv6Network((int(address) >> _NETWORK_BITS << _NETWORK_BITS, _NETWORK_BITS)).network_address)
