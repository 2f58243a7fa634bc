"""Messages of gRPC on their way in: how long they may take, and what they may hold of the server's memory.

A message is grpcio's until it is whole, and nobody is told how much of it has come. So the process is weighed, often,
while more calls wait for messages than there is memory for; what it has grown by counts towards the memory for
tensors, and where that is not enough, those end whose messages take longest. Compressed messages are not inflated by
grpcio, which would do it before anybody could say whether there is memory for it: they are inflated here, by threads,
a few at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError, out_of_memory
from gpuprof.serving.transport.inflating import Inflater, is_compressed
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.memory import private_bytes, return_free_memory

#: Weighed so often while messages may take more memory than there is.
WEIGH_S = 0.05
_TRIM_S = 1.0
#: What those headers begin with; no other message is looked into.
_FIRST_BYTES = (b"\x1f", b"\x78")


@dataclass(slots=True)
class _IncomingCall:
    """A call whose message has not come yet."""

    began: float
    until: float
    refusal: RefusedError | None = None


class MessageReader:
    """Reads the messages of all calls.

    Parameters
    ----------
    arena : Arena
        Whose memory messages are charged to.
    max_message_bytes : int
        Of a message, inflated.
    """

    def __init__(self, arena: Arena, max_message_bytes: int) -> None:
        self._arena = arena
        self._max_message_bytes = max_message_bytes
        self._receiving: dict[asyncio.Task[Any], _IncomingCall] = {}
        self._charged = 0
        self._empty_bytes = private_bytes()
        self._trimming: asyncio.Future[None] | None = None
        self._trimmed_at = -math.inf
        self._inflater = Inflater(self, max_message_bytes, HTTPStatus.INTERNAL_SERVER_ERROR)

    async def read_message(self, context: Any, limit_s: float = math.inf) -> Buffer | None:
        """Return the next message of a call, None where the client sends no more; `release` must be called for it.

        Parameters
        ----------
        context : ServicerContext
        limit_s : float

        Raises
        ------
        RefusedError
            When it does not come within ``limit_s``, or finds no memory.
        """
        task = asyncio.current_task()
        assert task is not None
        began = time.monotonic()
        receiving = self._receiving[task] = _IncomingCall(began, began + limit_s)
        try:
            message = await context.read()
        except asyncio.CancelledError:
            # `uncancel` returns how many others have cancelled the call as well: theirs goes on.
            if receiving.refusal is not None and not task.uncancel():
                raise receiving.refusal from None
            raise
        finally:
            del self._receiving[task]
        if not isinstance(message, bytes):
            return None
        self.charge(len(message))
        return await self._inflate(message) if message[:1] in _FIRST_BYTES and is_compressed(message) else message

    def charge(self, size: int) -> None:
        """Count a message of ``size`` bytes. Raises `RefusedError` when there is no memory for it."""
        if not self._arena.charge(size):
            raise out_of_memory()
        self._charged += size

    def release(self, size: int) -> None:
        """Count a message no longer that had ``size`` bytes, or a part of one."""
        self._charged -= size
        self._arena.discharge(size)

    def weigh(self) -> None:
        """Count what messages that are not whole yet have in memory; end some where that is too much."""
        arena = self._arena
        arena.count_elsewhere(0)
        if len(self._receiving) * self._max_message_bytes <= arena.capacity - arena.used:
            if not self._receiving and not self._charged:
                self._empty_bytes = min(self._empty_bytes, private_bytes())
            return
        # What is beyond the memory at rest and messages that are whole.
        arena.count_elsewhere(max(0, private_bytes() - self._empty_bytes - self._charged))
        if arena.used > arena.capacity and not self._trim():
            self._end_slowest()

    def watch(self, now: float) -> None:
        """End the calls whose message has not come in time; called now and then, which costs less than a timer each.

        Parameters
        ----------
        now : float
            Monotonic seconds.
        """
        for task, receiving in list(self._receiving.items()):
            if now > receiving.until:
                text = f"the message has not arrived within {receiving.until - receiving.began:.0f} s"
                self._end(task, receiving, RefusedError(HTTPStatus.REQUEST_TIMEOUT, text))

    def measure_idle_bytes(self) -> None:
        """Take the memory that the process has now for its own; called when it has nothing to do."""
        if not self._receiving and not self._charged:
            self._empty_bytes = private_bytes()

    def _trim(self) -> bool:
        """Have free memory returned, which the system still counts, unless that was done just now."""
        if self._trimming is not None and not self._trimming.done():
            return True
        if time.monotonic() - self._trimmed_at < _TRIM_S:
            return False
        self._trimmed_at = time.monotonic()
        self._trimming = asyncio.ensure_future(asyncio.to_thread(return_free_memory))
        return True

    def _end_slowest(self) -> None:
        slowest = sorted(self._receiving.items(), key=lambda item: item[1].began)
        for task, receiving in slowest[: (len(slowest) + 1) // 2]:
            self._end(task, receiving, out_of_memory())

    def _end(self, task: asyncio.Task[Any], receiving: _IncomingCall, refusal: RefusedError) -> None:
        if receiving.refusal is None:
            receiving.refusal = refusal
            task.cancel()

    async def _inflate(self, message: bytes) -> Buffer:
        """Return what a message was compressed from; charged is what is returned, as for any message."""
        try:
            return await self._inflater.inflate(message)
        finally:
            self.release(len(message))
