"""Whose costly message is worked on next: so many are at a time, and clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from gpuprof.serving.transport.inference import RefusedError


class ClientTurns:
    """Lets so much be done at a time, of each client in turn: nobody waits for all that another has sent.

    Parameters
    ----------
    at_once : int
    most_waiting : int or None
        Of a client, whose next is refused; None: any number.
    refusal, reason : str
        What who has as many is told, and the reason that is counted.
    """

    def __init__(self, at_once: int, most_waiting: int | None = None, refusal: str = "", reason: str = "") -> None:
        self._free = at_once
        self._most_waiting = most_waiting
        self._refusal, self._reason = refusal, reason
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of this client and hold it.

        Raises
        ------
        RefusedError
            503, when too much of this client waits.
        """
        await self._take(client)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        waiting = self._waiting.setdefault(client, deque())
        if self._most_waiting is not None and len(waiting) >= self._most_waiting:
            status, reason = HTTPStatus.SERVICE_UNAVAILABLE, self._reason
            raise RefusedError(status, self._refusal, 1.0, overloaded=True, reason=reason)
        begun = asyncio.get_running_loop().create_future()
        waiting.append(begun)
        try:
            await begun
        except asyncio.CancelledError:
            if not begun.cancelled():  # it has been given its turn meanwhile
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Pass the turn on to the client who has waited longest for one, unless nobody waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            waiting = self._waiting.pop(client)
            begun = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting
            if not begun.done():
                begun.set_result(None)
                return
        self._free += 1
