"""Limits how many large bodies are received at a time, so that those begun first are complete first.

The event loop reads from every readable connection. With hundreds of large bodies on their way, each would get less
than a hundredth of the bandwidth, and all would be complete at the same time: too late. So a few are received; the
others wait in the socket buffers of their connections, and TCP flow control slows their clients down.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

#: Bodies that are received at a time. More make nothing quicker: the router receives with one thread.
MOST_BODIES = 8
#: While so many bodies of a lane wait, no more of its requests are read: the head and the beginning of one that is then
#: refused, and its answer, take as long as half of a body.
MOST_WAITING = 8
#: A body that got fewer bytes in a turn of the loop waits for its client or its network, and gives up its turn: else
#: eight clients that send a byte now and then would block all others. Where the loop is idle its turns are short, and
#: more than a few bodies are received at a time, which does no harm there.
LEAST_BYTES = 1 << 13
#: A body occupies its turn for so many bytes; what is left is received beside the bodies of later turns.
TURN_BYTES = 1 << 23


class BodyReader(Protocol):
    """A connection on which a large body arrives."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that have been received."""
        ...

    def take_body_turn(self) -> None:
        """Start receiving; `BodyTurns.end` is to be called when the turn is over."""
        ...

    def drop_if_late(self, waited_s: float) -> bool:
        """Refuse the request if after this wait it can no longer be answered in time; return whether it was refused."""
        ...


class BodyTurns:
    """Receives a few large bodies at a time, models in rotation.

    Parameters
    ----------
    call_soon : callable or None
        Schedules a callback in the next turn of the loop; None: the running loop's own.

    Attributes
    ----------
    crowded : set
        Lanes of which `MOST_WAITING` bodies wait.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._call_soon = call_soon
        #: With the bytes that each had at the last check; None: its turn began after it.
        self._receiving: dict[BodyReader, int | None] = {}
        self._lanes: dict[Hashable, deque[tuple[float, float, BodyReader]]] = {}
        self._is_checking = self._is_giving = False
        self.crowded = set[Hashable]()

    def begin(self, reader: BodyReader, lane: Hashable, lifo_after_s: float) -> bool:
        """Return whether the reader may go on receiving; else it is to pause until its `take_body_turn` is called.

        Once the oldest of a lane has waited for longer than its ``lifo_after_s``, the newest is received first: it is
        answered in time, while in the order of arrival all would be received too late (adaptive LIFO).
        """
        if not self._lanes and len(self._receiving) < MOST_BODIES:
            self._receiving[reader] = None
            return True
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append((time.monotonic(), lifo_after_s, reader))
        if len(waiting) >= MOST_WAITING:
            self.crowded.add(lane)
        self._check_later()
        return False

    def end(self, reader: BodyReader) -> None:
        """Pass the turn on: the body is complete, its connection closed, or it has used its turn up."""
        if reader in self._receiving:
            del self._receiving[reader]
            self._give_turns()

    def _give_turns(self) -> None:
        if self._is_giving:  # re-entered by a reader that ends its turn at once: the outer call goes on
            return
        self._is_giving = True
        try:
            while self._lanes and len(self._receiving) < MOST_BODIES:
                self._give_turn(time.monotonic())
        finally:
            self._is_giving = False

    def _give_turn(self, now: float) -> None:
        """Give a turn to one body of the first lane, which then goes to the end of the rotation."""
        name = next(iter(self._lanes))
        waiting = self._lanes.pop(name)
        first_since, lifo_after_s, _ = waiting[0]
        since, _, reader = waiting.pop() if now - first_since > lifo_after_s else waiting.popleft()
        if waiting:
            self._lanes[name] = waiting
        self._notice_room(name, waiting)
        if not reader.drop_if_late(now - since):
            self._receiving[reader] = None
            reader.take_body_turn()

    def _check_later(self) -> None:
        if not self._is_checking:
            self._is_checking = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._check)

    def _check(self) -> None:
        """End the turns of bodies that get few bytes, and drop those that have waited too long to be in time."""
        self._is_checking = False
        now = time.monotonic()
        for reader, had in list(self._receiving.items()):
            if had is not None and reader.body_bytes < had + LEAST_BYTES:
                del self._receiving[reader]
            else:
                self._receiving[reader] = reader.body_bytes
        for name, waiting in list(self._lanes.items()):
            while waiting and waiting[0][2].drop_if_late(now - waiting[0][0]):
                waiting.popleft()
            if not waiting:
                del self._lanes[name]
            self._notice_room(name, waiting)
        self._give_turns()
        if self._lanes:
            self._check_later()

    def _notice_room(self, name: Hashable, waiting: deque[tuple[float, float, BodyReader]]) -> None:
        if len(waiting) < MOST_WAITING:
            self.crowded.discard(name)
