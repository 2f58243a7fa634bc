"""Which model's requests the router reads while it cannot keep up with all: no model takes the loop from the others.

A request that is refused costs the router about as much as one that is answered, so that a cheap model at several times
its capacity leaves little for a dear one, however idle the dear one's workers are. While the loop is busy and late, the
model that takes most of it has only so many requests read in each period; the limit falls, at most to the model's part,
while that lasts, and rises afterwards. What waits is read in the order in which it came, and its time counts from then.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

#: The loop is measured, and requests that wait are let on, so often.
PERIOD_S = 0.01
#: The loop keeps up while it is late by less, or its thread computes for less of the time: then others are to blame.
_LATE_S, _BUSY = 0.004, 0.7
_FALL, _RISE = 0.7, 1.1
#: A request takes so many times what reading it takes: its answer is to be read and sent, too.
_WHOLE = 3.0
_UNLIMITED = 10_000.0


@dataclass(slots=True)
class _Account:
    """What one model takes of the loop.

    ``limit`` is how many of its requests may be read in a period, ``count`` how many were in this one, and ``used_s``
    how long that took.
    """

    limit: float = _UNLIMITED
    count: int = 0
    used_s: float = 0.0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


class LoopTurns:
    """Shares the loop among models while there is not enough of it."""

    def __init__(self) -> None:
        self._accounts: dict[Hashable, _Account] = {}
        self._due = self._computed_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def admits(self, key: Hashable) -> bool:
        """Return whether a request of this model may be read now; else its reader is to call `wait`."""
        account = self._accounts.get(key)
        return account is None or (account.count < account.limit and not account.waiting)

    def wait(self, key: Hashable, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` when it is the reader's turn."""
        self._accounts[key].waiting.append(go_on)

    def charge(self, key: Hashable, seconds: float) -> None:
        """Count a request of a model, which has taken so long to read."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account()
        account.count += 1
        account.used_s += seconds
        if self._timer is None:
            self._plan()

    def begin_period(self, now: float, computed_s: float) -> None:
        """Adapt the limits to how late the loop is, and let on what waits.

        Parameters
        ----------
        now, computed_s : float
            Monotonic seconds; CPU seconds of the loop's thread.
        """
        late_s, took_s = now - self._due, now - self._due + PERIOD_S
        active = [account for account in self._accounts.values() if account.count]
        if late_s > _LATE_S and computed_s - self._computed_s > _BUSY * took_s:
            if len(active) > 1:  # else nobody is kept from anything
                most = max(active, key=lambda account: account.used_s)
                part = PERIOD_S / len(active) / (_WHOLE * most.used_s / most.count)
                most.limit = max(1.0, part, _FALL * min(most.limit, most.count))
        else:
            for account in self._accounts.values():
                account.limit = min(_UNLIMITED, _RISE * account.limit + 1.0)
        for account in self._accounts.values():
            account.count, account.used_s = 0, 0.0
        self._let_on()
        self._forget_idle()
        self._timer = None
        if self._accounts:
            self._plan()

    def _let_on(self) -> None:
        for account in list(self._accounts.values()):
            for _ in range(min(len(account.waiting), int(account.limit))):
                account.waiting.popleft()()

    def _forget_idle(self) -> None:
        for key, account in list(self._accounts.items()):
            if account.limit >= _UNLIMITED and not account.waiting and not account.count:
                del self._accounts[key]

    def _plan(self) -> None:
        self._due, self._computed_s = time.monotonic() + PERIOD_S, time.thread_time()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PERIOD_S, lambda: self.begin_period(time.monotonic(), time.thread_time()))
