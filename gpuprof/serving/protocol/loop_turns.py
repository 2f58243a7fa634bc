"""The order in which new requests are read under overload: models in rotation, for a bounded time in each loop turn.

The event loop calls every readable connection, one after another, before it polls again. A cheap model at several times
its capacity has thousands of them, and a refused request costs about as much as an answered one, so that each step of a
request for another model would wait for all of them. So requests are read for a bounded time in each turn of the loop;
those that come later in the turn wait in the lane of their model, and the lanes are served in rotation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

#: New requests are read for so long in each turn of the loop. A request takes half a dozen turns until it is answered,
#: and one more for each piece of a large body: beside a flooded model each of these turns takes so much longer.
TURN_S = 0.0005
#: Bytes of refused bodies that are received in each turn of the loop: a fraction of a millisecond.
DISCARDED_BYTES = 1 << 20
#: Adaptive LIFO: once the oldest of a lane has waited for longer, the newest are read, and after so many of them the
#: oldest. That is most often too late to be answered in time; but for these few all are, where in the order of arrival
#: none would be.
_LIFO_AFTER_S, NEWEST_FOR_OLDEST = 0.05, 7


class DiscardTurns:
    """Receives the bodies of refused requests piece by piece, a few pieces in each turn of the loop.

    Under overload there are hundreds of them, and received without a limit they would slow down the bodies of requests
    that are to be answered. An otherwise idle loop turns without a pause, so nothing is delayed there.

    Parameters
    ----------
    call_soon : callable or None
        As for `LoopTurns`.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._call_soon = call_soon
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()

    def wait(self, resume: Callable[[], None], size: int) -> None:
        """Call ``resume``, which receives at most ``size`` bytes, in a turn with that much left to receive."""
        self._waiting.append((resume, size))
        if len(self._waiting) == 1:
            self._plan_turn()

    def _plan_turn(self) -> None:
        (self._call_soon or asyncio.get_running_loop().call_soon)(self._begin_turn)

    def _begin_turn(self) -> None:
        left = DISCARDED_BYTES
        try:
            while self._waiting and left > 0:
                resume, size = self._waiting.popleft()
                left -= size
                resume()
        finally:
            if self._waiting:
                self._plan_turn()


@dataclass(slots=True)
class _Lane:
    """The readers that wait, each with the time since when."""

    waiting: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    _newest_taken: int = 0

    def take(self, now: float) -> Callable[[], None]:
        """Remove and return the next reader."""
        if now - self.waiting[0][0] >= _LIFO_AFTER_S and self._newest_taken < NEWEST_FOR_OLDEST:
            self._newest_taken += 1
            return self.waiting.pop()[1]
        self._newest_taken = 0
        return self.waiting.popleft()[1]


class LoopTurns:
    """Shares the time of the event loop among models under overload.

    Parameters
    ----------
    call_soon : callable or None
        Schedules a callback behind all that the loop calls in this turn; None: the running loop's own.
    held : collection
        Lanes whose requests are not read at the moment; it may change at any time.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        held: Collection[Hashable] = frozenset(),
    ) -> None:
        self._call_soon, self._held = call_soon, held
        self._lanes: dict[Hashable, _Lane] = {}
        self._began = self._until = 0.0
        self._is_due = self._is_open = False

    def admits_all(self, now: float) -> bool:
        """Return whether any request may be read now, because none waits or is held and the turn is not over."""
        if self._lanes or self._held:
            return False
        if not self._is_open:
            self._open_turn(now)
            return True
        return now < self._until

    def admits(self, lane: Hashable, now: float) -> bool:
        """Return whether a request of this lane may be read now; else its reader is to call `wait`."""
        if not (self._lanes or self._is_open):
            self._open_turn(now)
        return now < self._until and lane not in self._lanes and lane not in self._held

    def arrival(self, now: float) -> float:
        """Return when a request that is read now arrived: at the beginning of the turn at the latest.

        The loop calls the readable connections one after another; under overload the last of them waits for tens of
        milliseconds, which count towards its deadline.
        """
        return min(now, self._began) if self._is_open else now

    def wait(self, lane: Hashable, resume: Callable[[], None]) -> None:
        """Call ``resume`` when it is the turn of a reader that `admits` has just denied."""
        self._lanes.setdefault(lane, _Lane()).waiting.append((time.monotonic(), resume))
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._is_due:
            self._is_due = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._begin_turn)

    def _open_turn(self, now: float) -> None:
        """Start the clock of a turn, which lasts until the loop has called all readable connections."""
        self._until = now + TURN_S
        if not self._is_open:
            self._is_open, self._began = True, now
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._close_turn)

    def _close_turn(self) -> None:
        self._is_open = False

    def _begin_turn(self) -> None:
        """Read waiting requests for the time of a turn; called behind all readable connections."""
        self._is_due = False
        now = time.monotonic()
        self._open_turn(now)
        try:
            while now < self._until and (name := self._find_next_lane()) is not None:
                self._read_next(name, now)
                now = time.monotonic()
        finally:
            if self._lanes:  # even if a reader has raised, the others get their turns
                self._plan_turn()

    def _find_next_lane(self) -> Hashable | None:
        return next((name for name in self._lanes if name not in self._held), None)

    def _read_next(self, name: Hashable, now: float) -> None:
        """Read one request of a lane, which then goes to the end of the rotation, across turns too."""
        lane = self._lanes.pop(name)
        resume = lane.take(now)
        if lane.waiting:
            self._lanes[name] = lane
        resume()
