"""Turns of the models of a worker: one batch runs at once, first come, first served."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that is passed on in the order of arrival, which plain locks do not guarantee."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_running = False

    def __enter__(self) -> Turns:
        """Wait for all earlier turns."""
        gate = threading.Lock()
        with self._guard:
            if not self._is_running:
                self._is_running = True
                return self
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()  # released with the turn
        return self

    def __exit__(self, *_: object) -> None:
        """Pass the turn on."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_running = False
