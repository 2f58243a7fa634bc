"""What one client may send to the gRPC port beside data."""

from __future__ import annotations

#: A client may send so many control frames and heads of calls in a second, and so many at once. Beyond that, one for
#: each of so many bytes that it is sent: who reads large answers says often how far it has come.
_FRAMES_PER_S, _FRAMES_AT_ONCE, _BYTES_PER_FRAME = 20_000.0, 20_000.0, 1024


class ClientAccount:
    """Counts what all connections of a client send, and slows down who sends hardly anything but control frames.

    HTTP/2 limits how much data may be sent that nobody waits for, but neither settings nor pings nor resets, each of
    which keeps grpcio and the relay busy.

    Examples
    --------
    >>> account = ClientAccount(now=0.0)
    >>> account.spend(50_000, now=0.0)
    >>> account.may_send(now=1.0), account.may_send(now=2.0)
    (False, True)
    """

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._left, self._at = _FRAMES_AT_ONCE, now

    def may_send(self, now: float) -> bool:
        """Return whether the client may send more."""
        if self._left <= 0.0:
            self.spend(0, now)
        return self._left > 0.0

    def spend(self, cost: int, now: float) -> None:
        """Count frames that the client has sent."""
        self._left = min(_FRAMES_AT_ONCE, self._left + (now - self._at) * _FRAMES_PER_S) - cost
        self._at = now

    def earn(self, size: int) -> None:
        """Count bytes that the client is sent."""
        self._left += size / _BYTES_PER_FRAME

    def is_needless(self, now: float) -> bool:
        """Return whether a new account would be the same."""
        return self._left + (now - self._at) * _FRAMES_PER_S >= _FRAMES_AT_ONCE
