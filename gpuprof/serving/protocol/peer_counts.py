"""How much of something each client has: connections, calls."""

from __future__ import annotations


class PeerCounts:
    """Lets one address have only so many.

    Attributes
    ----------
    turned_away : int
        How often an address had too many.

    Examples
    --------
    >>> calls = PeerCounts(1)
    >>> calls.add("10.0.0.1"), calls.add("10.0.0.1"), calls.add("10.0.0.2")
    (True, False, True)
    >>> calls.discard("10.0.0.1")
    >>> calls.add("10.0.0.1")
    True
    """

    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self.turned_away = 0
        self._counts: dict[str, int] = {}

    def add(self, peer: str) -> bool:
        """Count one more; False, and nothing counted, when the address has too many."""
        count = self._counts.get(peer, 0)
        if count >= self.per_peer:
            self.turned_away += 1
            return False
        self._counts[peer] = count + 1
        return True

    def discard(self, peer: str) -> None:
        """Count one less."""
        left = self._counts[peer] - 1
        if left:
            self._counts[peer] = left
        else:
            del self._counts[peer]
