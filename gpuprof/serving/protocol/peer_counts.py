"""How much of something each client has: connections, calls."""

from __future__ import annotations

from collections import Counter


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
        self._counts: Counter[str] = Counter()

    def add(self, peer: str) -> bool:
        """Count one more; False, and nothing counted, when the address has too many."""
        if self._counts[peer] >= self.per_peer:
            self.turned_away += 1
            return False
        self._counts[peer] += 1
        return True

    def discard(self, peer: str) -> None:
        """Count one less."""
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
