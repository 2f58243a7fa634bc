"""Clients with a recent failed request: for a while, their requests do not share batches with other clients'."""

from __future__ import annotations

_APART_S = 10.0


class FailingClients:
    """Clients whose requests have recently made the model fail.

    A failing request makes its whole batch run again. Without this record, all clients of the batch would lose time
    with every further failing request.

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
        """Record a failed request of a client; return whether the client is newly recorded."""
        is_new = not self.has(client, now)
        self._until = {name: end for name, end in self._until.items() if end > now}
        self._until[client] = now + _APART_S
        return is_new

    def has(self, client: str, now: float) -> bool:
        """Return whether a request of this client has just failed."""
        return bool(self._until) and self._until.get(client, 0.0) > now
