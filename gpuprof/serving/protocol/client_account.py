"""What one client may send to the gRPC port beside data."""

from __future__ import annotations

#: A client may send so many control frames and heads of calls in a second, and so many at once. Beyond that, one for
#: each of so many bytes that it is sent: who reads large answers says often how far it has come.
_FRAMES_PER_S, _FRAMES_AT_ONCE, _BYTES_PER_FRAME = 20_000.0, 20_000.0, 1024


class ClientAccount:
    """Counts what all connections of a client send, and slows down who sends hardly anything but control frames.

    HTTP/2 limits how much data may be sent that nobody waits for, but neither settings nor pings nor resets, each of
    which keeps grpcio and the relay busy.

    Attributes
    ----------
    connections : int
        Of the client.

    Examples
    --------
    >>> account = ClientAccount(now=0.0)
    >>> account.spend(50_000, now=0.0)
    >>> account.may_send(now=1.0), account.may_send(now=2.0)
    (False, True)
    """

    __slots__ = ("_at", "_left", "connections")

    def __init__(self, now: float) -> None:
        self._left, self._at = _FRAMES_AT_ONCE, now
        self.connections = 0

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


class ConnectionAccount:
    """Counts what one connection sends: it goes on, whatever others of its client send, with less than its part.

    Its part of what a client may send grows as time goes by, to as much as a second's: who opens a connection
    has none yet.

    Parameters
    ----------
    client : ClientAccount
    now : float
        Monotonic seconds.
    """

    __slots__ = ("_at", "_client", "_left")

    def __init__(self, client: ClientAccount, now: float) -> None:
        self._client, self._left, self._at = client, 0.0, now
        client.connections += 1

    def may_send(self, now: float) -> bool:
        """Return whether the connection may send more."""
        if self._client.may_send(now):
            return True
        self._grow(now)
        return self._left > 0.0

    def spend(self, cost: int, now: float) -> None:
        """Count frames that the connection has sent."""
        self._client.spend(cost, now)
        self._grow(now)
        self._left -= cost

    def earn(self, size: int) -> None:
        """Count bytes that the connection is sent."""
        self._client.earn(size)

    def close(self) -> None:
        """Count the connection no longer."""
        self._client.connections -= 1

    def _grow(self, now: float) -> None:
        part_per_s = _FRAMES_PER_S / max(1, self._client.connections)
        self._left = min(part_per_s, self._left + (now - self._at) * part_per_s)
        self._at = now
