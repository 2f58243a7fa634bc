"""In which order new requests are read while the router cannot keep up: model by model, for a while in each turn.

The event loop calls every connection that has something to read, one after another, before it looks again who has. A
cheap model at several times its capacity has thousands of them, refused requests cost about as much as answered ones,
and a dear one that is sent little waits for all of them at each step. So requests are read for a bounded time in each
turn of the loop; what comes later in the turn waits in a lane of its model, and the lanes are served in rotation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

#: New requests are read for so long in each turn of the loop. A request takes half a dozen turns until it is answered,
#: of a large body one for each piece, so that a model beside a flooded one waits for that many times as long.
TURN_S = 0.0005
#: Of bodies that are refused so much is received in each turn of the loop: a fraction of a millisecond.
DISCARDED_BYTES = 1 << 20
#: Where somebody has waited for longer, every other turn of the lane goes to who came last: half of them are answered
#: in time, while in the order in which they came nobody would be.
_LONG_S = 0.05


class DiscardTurns:
    """Has bodies that are refused received in pieces, of which each turn of the loop has room for a few.

    Under overload there are hundreds of them, and those that are to be answered would come as slowly. Where the loop
    has nothing else to do its turns follow one another at once.

    Parameters
    ----------
    call_soon : callable or None
        As for `LoopTurns`.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._call_soon = call_soon
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()

    def wait(self, resume: Callable[[], None], size: int) -> None:
        """Call ``resume``, which has at most ``size`` bytes received, in a turn that has room for them."""
        self._waiting.append((resume, size))
        if len(self._waiting) == 1:
            self._plan_turn()

    def _plan_turn(self) -> None:
        (self._call_soon or asyncio.get_running_loop().call_soon)(self._begin_turn)

    def _begin_turn(self) -> None:
        room = DISCARDED_BYTES
        try:
            while self._waiting and room > 0:
                resume, size = self._waiting.popleft()
                room -= size
                resume()
        finally:
            if self._waiting:
                self._plan_turn()


@dataclass(slots=True)
class _Lane:
    """Who waits to be read, each with when that began."""

    waiting: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    _takes_newest: bool = False

    def take(self, now: float) -> Callable[[], None]:
        """Remove and return who is next."""
        is_long = now - self.waiting[0][0] >= _LONG_S
        newest, self._takes_newest = self._takes_newest and is_long, is_long and not self._takes_newest
        return (self.waiting.pop() if newest else self.waiting.popleft())[1]


class LoopTurns:
    """Shares the loop among models while there is not enough of it.

    Parameters
    ----------
    call_soon : callable or None
        Calls what it is given behind all that the loop calls in this turn; None: the running loop's own.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._call_soon = call_soon
        self._lanes: dict[Hashable, _Lane] = {}
        self._began = self._until = 0.0
        self._is_due = self._is_open = False

    def admits_all(self, now: float) -> bool:
        """Return whether nobody waits and any request may be read now."""
        if self._lanes:
            return False
        if not self._is_open:
            self._open_turn(now)
            return True
        return now < self._until

    def admits(self, lane: Hashable, now: float) -> bool:
        """Return whether a request may be read now beside those that wait; else its reader is to call `wait`."""
        return now < self._until and lane not in self._lanes

    def arrival(self, now: float) -> float:
        """Return since when a request waits that is read now: all of a turn's were there when it began.

        The loop calls those that have something to read one after another; under overload the last of them waits for
        tens of milliseconds, which count towards its deadline.
        """
        return min(now, self._began) if self._is_open else now

    def wait(self, lane: Hashable, resume: Callable[[], None]) -> None:
        """Call ``resume`` when it is the reader's turn, which `admits` has just denied."""
        self._lanes.setdefault(lane, _Lane()).waiting.append((time.monotonic(), resume))
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._is_due:
            self._is_due = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._begin_turn)

    def _open_turn(self, now: float) -> None:
        """Begin to count the time of a turn, which lasts until the loop has called all that had something."""
        self._until = now + TURN_S
        if not self._is_open:
            self._is_open, self._began = True, now
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._close_turn)

    def _close_turn(self) -> None:
        self._is_open = False

    def _begin_turn(self) -> None:
        """Read what waits, for as long as a turn is; called when all connections that had something were called."""
        self._is_due = False
        now = time.monotonic()
        self._open_turn(now)
        try:
            while self._lanes and now < self._until:
                self._read_next(now)
                now = time.monotonic()
        finally:
            if self._lanes:  # whatever happens to a reader, the others get their turn
                self._plan_turn()

    def _read_next(self, now: float) -> None:
        """Have one request of the first lane read; the lane is then the last, in the next turn, too."""
        name = next(iter(self._lanes))
        lane = self._lanes.pop(name)
        resume = lane.take(now)
        if lane.waiting:
            self._lanes[name] = lane
        resume()
