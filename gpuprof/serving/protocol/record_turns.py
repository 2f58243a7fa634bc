"""How much of what clients send by TLS is decrypted at a time: a record takes microseconds, however short it is.

Who sends a byte in each record (RFC 8446, 5.1) could have the router decrypt what has come of one connection for 20 ms,
before any token is seen, and connections are many. So records are decrypted for a bounded time in each turn of the
loop, of each client and of all. A connection with short ones has a part of a millisecond, and then waits for its turn:
clients in rotation, and the connections of each.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

#: Of one client, and of all, in each turn of the loop, beside one read of each connection and a record of those that
#: come later.
TURN_S, ALL_TURN_S = 0.003, 0.006
#: What is longer and takes more for each byte than records of some 60 bytes do is slow; the next is to take so long.
_SLOW_S, _SLOW_BYTE_S, _SLOW_READ_S = 0.0002, 3e-8, 0.0003
#: One slow connection goes on after so long.
PAUSE_S = 0.002
#: Of a connection of which nothing is known yet, and how much more when that was not slow.
FIRST_BYTES, _GROWTH, _MOST_BYTES = 1 << 10, 8, 1 << 30


class RecordTurns:
    """Shares the time for decrypting among the connections of a server.

    Parameters
    ----------
    clock : callable
        Returns seconds of processor time.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        #: In this turn, by client.
        self._spent: dict[str, float] = {}
        self._spent_by_all = 0.0
        self._late: list[Callable[[], None]] = []
        self._slow: dict[str, deque[Callable[[], None]]] = {}

    def is_over(self, client: str) -> bool:
        """Return whether records of a client have been decrypted for long enough in this turn of the loop."""
        return self._spent.get(client, 0.0) > TURN_S or self._spent_by_all > ALL_TURN_S

    def spend(self, client: str, seconds: float) -> None:
        """Count time that decrypting took."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._spent[client] = self._spent.get(client, 0.0) + seconds
        self._spent_by_all += seconds

    def wait(self, client: str, resume: Callable[[], None], is_slow: bool) -> None:
        """Call ``resume`` in the next turn, or when it is the turn of this connection among the slow ones."""
        if not is_slow:
            self._late.append(resume)
            return
        if not self._slow:
            asyncio.get_running_loop().call_later(PAUSE_S, self._resume_slow)
        self._slow.setdefault(client, deque()).append(resume)

    def _end_turn(self) -> None:
        self._spent.clear()
        self._spent_by_all, late, self._late = 0.0, self._late, []
        for resume in late:
            resume()

    def _resume_slow(self) -> None:
        """Let one slow connection of the client go on whose turn it is."""
        client = next(iter(self._slow))
        waiting = self._slow.pop(client)
        resume = waiting.popleft()
        if waiting:
            self._slow[client] = waiting
        if self._slow:
            asyncio.get_running_loop().call_later(PAUSE_S, self._resume_slow)
        resume()


class RecordReader:
    """Limits what is decrypted of one connection.

    Parameters
    ----------
    turns : RecordTurns
    client : str
        Whose connection it is.
    resume : callable
        Called when the connection may be read again, after `count` returned True.

    Attributes
    ----------
    is_waiting : bool
        Whether the connection must not be read.
    """

    __slots__ = ("_began", "_client", "_is_late", "_limit", "_resume", "_turns", "is_waiting")

    def __init__(self, turns: RecordTurns, client: str, resume: Callable[[], None]) -> None:
        self._turns, self._client, self._resume = turns, client, resume
        self._limit = FIRST_BYTES
        self._began = 0.0
        self._is_late = self.is_waiting = False

    def limit(self, space: memoryview) -> memoryview:
        """Return the part of ``space`` that may be decrypted into now."""
        self._is_late = self._turns.is_over(self._client)
        self._began = self._turns.clock()
        return space[: 1 if self._is_late else self._limit]

    def count(self, size: int) -> bool:
        """Count ``size`` bytes that were decrypted; return whether the connection must wait from now on."""
        took_s = self._turns.clock() - self._began
        self._turns.spend(self._client, took_s)
        is_slow = took_s > _SLOW_S and took_s > size * _SLOW_BYTE_S
        if is_slow:
            self._limit = max(1, int(size * _SLOW_READ_S / took_s))
        elif size == self._limit:
            self._limit = min(_GROWTH * size, _MOST_BYTES)
        if (is_slow or self._is_late) and not self.is_waiting:
            self.is_waiting = True
            self._turns.wait(self._client, self._end_wait, is_slow)
        return self.is_waiting

    def _end_wait(self) -> None:
        self.is_waiting = False
        self._resume()
