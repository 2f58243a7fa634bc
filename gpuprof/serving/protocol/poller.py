"""Sockets by the events that they wait for, so many of which are told at a time."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable


class Poller:
    """An epoll, and whom its events are told."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there are events."""
        return self._epoll.fileno()

    def watch(self, end: socket.socket | Poller, events: int, handler: Callable[[int], None]) -> None:
        """Tell ``handler`` of these events of a socket, and of its end; of none: not even of that."""
        file = end.fileno()
        if not events:
            self.unwatch(end)
            return
        (self._epoll.modify if file in self._handlers else self._epoll.register)(file, events)
        self._handlers[file] = handler

    def unwatch(self, end: socket.socket | Poller) -> None:
        """Tell nobody of a socket any more, if somebody was told."""
        if self._handlers.pop(end.fileno(), None):
            self._epoll.unregister(end.fileno())

    def dispatch(self, timeout_s: float | None, most: int) -> None:
        """Wait for events and tell of so many; of the others the next time, before those that come later."""
        for file, events in self._epoll.poll(timeout_s, most):
            if handler := self._handlers.get(file):
                handler(events)
