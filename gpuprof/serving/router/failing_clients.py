"""Clients of whom a request has just failed: their requests share no batch with those of others for a while."""

from __future__ import annotations

_APART_S = 10.0
#: Kept at once; beyond it those are forgotten who failed longest ago.
_MOST_CLIENTS = 1024


class FailingClients:
    """Remembers who sent what the model cannot work on.

    A request that fails has its batch computed again, of which every client would otherwise lose its part whenever
    another sends such a request.

    Examples
    --------
    >>> failing = FailingClients()
    >>> failing.note("somebody", now=0.0)
    True
    >>> failing.has("somebody", now=9.0), failing.has("somebody", now=11.0), failing.has("another", now=0.0)
    (True, False, False)
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def note(self, client: str, now: float) -> bool:
        """Note that a request has failed; return whether the client was not known as one of those."""
        is_new = not self.has(client, now)
        self._until.pop(client, None)
        self._until[client] = now + _APART_S
        if len(self._until) > _MOST_CLIENTS:
            del self._until[next(iter(self._until))]
        return is_new

    def has(self, client: str, now: float) -> bool:
        """Return whether a request of this client has just failed."""
        return bool(self._until) and self._until.get(client, 0.0) > now
