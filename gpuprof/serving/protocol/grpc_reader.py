"""Messages of gRPC on their way in: how long they may take, and what they may hold of the server's memory.

A message is grpcio's until it is whole, and nobody is told how much of it has come. So the process is weighed, often,
while more calls wait for messages than there is memory for; what it has grown by counts towards the memory for tensors,
and where that is not enough, those end whose messages take longest. A whole message that finds no memory waits for a
moment: what is free must be weighed, and returned to the system, before anybody knows of it. Compressed messages are
not inflated by grpcio, which would do it before anybody could say whether there is memory for it: they are inflated
here, by threads, a few at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import grpc

from gpuprof.serving.protocol.grpc_refusals import end_call
from gpuprof.serving.protocol.peer_counts import peer_of
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError, out_of_memory
from gpuprof.serving.transport.inflating import Inflater, is_compressed
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.memory import private_bytes, return_free_memory

#: Weighed so often while messages may take more memory than there is.
WEIGH_S = 0.05
_TRIM_S = 1.0
#: For so long a whole message waits for memory.
_ROOM_S = 1.0
#: For so long others end before a call whose message should be short, where there is not memory enough.
_SHORT_S = 0.2
#: Of a message without tensors; so much is taken of a full memory, too.
MAX_SHORT_BYTES = 64 * 1024
#: What those headers begin with; no other message is looked into.
_FIRST_BYTES = (b"\x1f", b"\x78")


@dataclass(slots=True, eq=False)
class _IncomingCall:
    """A call whose message has not come yet, or waits for memory."""

    context: Any
    began: float
    until: float
    is_short: bool
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
        self._receiving: set[_IncomingCall] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._weighed = asyncio.Event()
        self._charged = 0
        self._empty_bytes = private_bytes()
        self._trimming: asyncio.Future[None] | None = None
        self._trimmed_at = -math.inf
        self._inflater = Inflater(self, max_message_bytes, HTTPStatus.INTERNAL_SERVER_ERROR)

    async def read_message(self, context: Any, limit_s: float = math.inf, is_short: bool = False) -> Buffer | None:
        """Return the next message of a call, None where the client sends no more; `release` must be called for it.

        Parameters
        ----------
        context : ServicerContext
        limit_s : float
        is_short : bool
            Whether its method takes no tensors.

        Raises
        ------
        RefusedError
            When it does not come within ``limit_s``, or finds no memory.
        """
        began = time.monotonic()
        receiving = _IncomingCall(context, began, began + limit_s, is_short)
        self._receiving.add(receiving)
        try:
            message = await context.read()
            if isinstance(message, bytes):
                await self._charge_whole(len(message), receiving)
        except grpc.aio.BaseError:
            if receiving.refusal is None:
                raise
        finally:
            self._receiving.remove(receiving)
        if receiving.refusal is not None:
            raise receiving.refusal
        if not isinstance(message, bytes):
            return None
        if message[:1] in _FIRST_BYTES and is_compressed(message):
            return await self._inflate(message, peer_of(context))
        return message

    async def _charge_whole(self, size: int, receiving: _IncomingCall) -> None:
        """Count a message that has come; refuse it where it finds no memory for too long."""
        until = time.monotonic() + _ROOM_S
        while receiving.refusal is None:
            if self._arena.charge_counted(size, is_needed=receiving.is_short and size <= MAX_SHORT_BYTES):
                self._charged += size
                return
            if time.monotonic() > until:
                receiving.refusal = out_of_memory()
            else:
                await self._weighed.wait()

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
        self._count_unfinished()
        weighed, self._weighed = self._weighed, asyncio.Event()
        weighed.set()

    def _count_unfinished(self) -> None:
        arena = self._arena
        arena.count_elsewhere(0)
        if len(self._receiving) * self._max_message_bytes <= arena.capacity - arena.used:
            if not self._receiving and not self._charged:
                self._empty_bytes = min(self._empty_bytes, private_bytes())
            return
        # What is beyond the memory at rest and what is charged: messages that are whole, answers, what HTTP has.
        arena.count_elsewhere(max(0, private_bytes() - self._empty_bytes - arena.charged))
        if arena.used > arena.capacity and not self._trim():
            self._end_slowest()

    def watch(self, now: float) -> None:
        """End the calls whose message has not come in time; called now and then, which costs less than a timer each.

        Parameters
        ----------
        now : float
            Monotonic seconds.
        """
        for receiving in self._receiving:
            if now > receiving.until and receiving.refusal is None:
                text = f"the message has not arrived within {receiving.until - receiving.began:.0f} s"
                self._end(receiving, RefusedError(HTTPStatus.REQUEST_TIMEOUT, text))

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
        waiting = [receiving for receiving in self._receiving if receiving.refusal is None]
        young = time.monotonic() - _SHORT_S
        # What asks for the health of a full server is to be told.
        large = [receiving for receiving in waiting if not receiving.is_short or receiving.began < young]
        slowest = sorted(large or waiting, key=lambda receiving: receiving.began)
        for receiving in slowest[: (len(slowest) + 1) // 2]:
            self._end(receiving, out_of_memory())

    def _end(self, receiving: _IncomingCall, refusal: RefusedError) -> None:
        """End a call, with which its read ends, too.

        Cancelling the read instead would leave the message to grpcio (1.85), which keeps it for good when it comes, and
        writes where it is to memory that is somebody else's by then.
        """
        receiving.refusal = refusal
        ending = asyncio.ensure_future(_tell(receiving.context, refusal))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _inflate(self, message: bytes, client: str) -> Buffer:
        """Return what a message was compressed from; charged is what is returned, as for any message."""
        try:
            return await self._inflater.inflate(message, client)
        finally:
            self.release(len(message))


async def _tell(context: Any, refusal: RefusedError) -> None:
    with suppress(grpc.aio.BaseError):  # so `abort` ends, or it is over already
        await end_call(context, refusal)
