"""Which large bodies are received at a time: a few, so that those begun first are whole first.

The event loop reads from every connection that has something. With hundreds of large bodies on their way each gets a
few hundredths of what the router can receive, so that all of them are whole at the same time, which is too late. So a
few are received and the others wait in the buffers of their connections, which slows their clients down, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

#: Bodies that are received at a time. More make nothing quicker: the router receives with one thread.
MOST_BODIES = 8
#: Of whom a turn of the loop finds less, that one waits for its client or its network, and keeps nobody from being
#: received: else eight clients that send a byte now and then would keep all others out. Where the loop has little to
#: do its turns are short, and more than a few are received, which then costs nobody anything.
LEAST_BYTES = 1 << 13
#: A body holds others up for so many bytes; beyond them it is received beside those that have their turn.
TURN_BYTES = 1 << 23


class BodyReader(Protocol):
    """A connection on which a large body comes."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that have come."""
        ...

    def take_body_turn(self) -> None:
        """Receive what comes until `BodyTurns.end` is called."""
        ...

    def gives_up(self, waited_s: float) -> bool:
        """Return whether the body is no longer to be received for its answer; it is then refused."""
        ...


class BodyTurns:
    """Lets a few large bodies be received at a time, of the models in rotation.

    Parameters
    ----------
    call_soon : callable or None
        Calls what it is given in the next turn of the loop; None: the running loop's own.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._call_soon = call_soon
        #: With the bytes that each had at the last check; None: its turn began after it.
        self._receiving: dict[BodyReader, int | None] = {}
        self._lanes: dict[Hashable, deque[tuple[float, float, BodyReader]]] = {}
        self._is_checking = self._is_giving = False

    def begin(self, reader: BodyReader, lane: Hashable, long_s: float) -> bool:
        """Return whether the reader may go on to receive; else it is to pause, and its `take_body_turn` is called.

        Where the first of a lane has waited for longer than its ``long_s``, who came last is received first: they are
        answered in time, while in the order in which they came all would be received when it is too late.
        """
        if not self._lanes and len(self._receiving) < MOST_BODIES:
            self._receiving[reader] = None
            return True
        self._lanes.setdefault(lane, deque()).append((time.monotonic(), long_s, reader))
        self._check_later()
        return False

    def end(self, reader: BodyReader) -> None:
        """Let another be received: this one's body is whole, its connection gone, or its turn over."""
        if reader in self._receiving:
            del self._receiving[reader]
            self._give_turns()

    def _give_turns(self) -> None:
        if self._is_giving:  # by a reader that ends its turn as soon as it has it: the loop below goes on
            return
        self._is_giving = True
        try:
            while self._lanes and len(self._receiving) < MOST_BODIES:
                self._give_turn(time.monotonic())
        finally:
            self._is_giving = False

    def _give_turn(self, now: float) -> None:
        """Have one body of the first lane received; the lane is then the last."""
        name = next(iter(self._lanes))
        waiting = self._lanes.pop(name)
        first_since, long_s, _ = waiting[0]
        since, _, reader = waiting.pop() if now - first_since > long_s else waiting.popleft()
        if waiting:
            self._lanes[name] = waiting
        if not reader.gives_up(now - since):
            self._receiving[reader] = None
            reader.take_body_turn()

    def _check_later(self) -> None:
        if not self._is_checking:
            self._is_checking = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._check)

    def _check(self) -> None:
        """End the turns of those that send little, and the waiting of those who came too early to be in time."""
        self._is_checking = False
        now = time.monotonic()
        for reader, had in list(self._receiving.items()):
            if had is not None and reader.body_bytes < had + LEAST_BYTES:
                del self._receiving[reader]
            else:
                self._receiving[reader] = reader.body_bytes
        for name, waiting in list(self._lanes.items()):
            while waiting and waiting[0][2].gives_up(now - waiting[0][0]):
                waiting.popleft()
            if not waiting:
                del self._lanes[name]
        self._give_turns()
        if self._lanes:
            self._check_later()
