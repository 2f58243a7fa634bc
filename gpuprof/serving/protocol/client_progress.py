"""Whether a client makes progress: closes connections that stall, or on which a request or an answer takes too long."""

from __future__ import annotations

import time

#: A client that sends a request or reads an answer more slowly than this on the whole has stalled.
_LEAST_BYTES_PER_S = 1 << 17
#: One that has asked nothing, or not gone on with a request, for so long makes room where there are too many.
_IDLE_S, _SILENT_S = 1.0, 5.0
#: And, for another of the same client, one whose request is not whole after so long.
_UNFINISHED_S = 0.5


class ClientProgress:
    """When a connection last made progress, and since when its request or answer has been under way.

    Attributes
    ----------
    opened, touched : float
        When the connection was opened, and when bytes last moved on it: monotonic seconds.
    """

    def __init__(self) -> None:
        self.opened = self.touched = time.monotonic()
        self._began: float | None = None

    def receive(self) -> None:
        """Record that bytes have come; the first of a request start its time."""
        self.touched = time.monotonic()
        if self._began is None:
            self._began = self.touched

    def restart(self) -> None:
        """Start the time of the request or answer anew: the server, not the client, has kept it waiting."""
        self.touched = self._began = time.monotonic()

    def answer(self, is_under_way: bool) -> None:
        """Record that a request was answered; ``is_under_way``: whether the answer, or another request, still is."""
        self.touched = time.monotonic()
        self._began = self.touched if is_under_way else None

    def send(self, is_last: bool) -> None:
        """Record that all answers are sent; ``is_last``: whether no other request is under way."""
        self.touched = time.monotonic()
        if is_last:
            # Else the time of the next request would begin here, however long the client pauses before it.
            self._began = None

    def is_quiet(self, now: float, is_asked: bool) -> bool:
        """Return whether nothing has moved for a while; ``is_asked``: whether a request has begun."""
        return now - self.touched > (_SILENT_S if is_asked else _IDLE_S)

    def has_lasted(self, now: float) -> bool:
        """Return whether a request has been under way for longer than requests usually are."""
        return self._began is not None and now - self._began > _UNFINISHED_S

    def is_overdue(self, now: float, stall_s: float, byte_count: int) -> bool:
        """Return whether nothing has moved for ``stall_s``, or ``byte_count`` bytes have taken ``stall_s`` too long."""
        if now - self.touched > stall_s:
            return True
        return self._began is not None and now - self._began > stall_s + byte_count / _LEAST_BYTES_PER_S
