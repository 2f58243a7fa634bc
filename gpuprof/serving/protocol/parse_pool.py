"""Parses and writes large texts in other processes: megabytes of JSON would stall the router.

Threads would not do: who makes a million Python objects of a text holds the interpreter's lock meanwhile. What arrives
is parsed under a limit of memory, and what goes wrong there, even the end of the process, is one request's refusal.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

from gpuprof.serving.transport.client_turns import ClientTurns
from gpuprof.serving.transport.inference import RefusedError

#: What is parsed on the event loop: a few milliseconds' work.
ON_LOOP_BYTES = 1 << 18
#: Larger texts are not read at all: tensors can be sent as they are.
MAX_TEXT_BYTES = 1 << 24
_PROCESSES = 1
#: With its process, and on their way there; more of their texts would be copied before it is their turn.
_AT_ONCE = 2
#: Of one client.
_MAX_WAITING = 16
_MAX_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A refusal on its way between processes: what `RefusedError` is made of."""

    status: HTTPStatus
    message: str


class ParsePool:
    """Runs functions in another process, which is started for the first of them."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        refusal = "too many large texts of this client wait to be read: send tensors as binary data"
        self._turns = ClientTurns(_AT_ONCE, _MAX_WAITING, refusal, "large texts")

    def turn(self, client: str) -> AbstractAsyncContextManager[None]:
        """Return what waits for a turn of this client and holds it: `run` is called within.

        Entering it raises `RefusedError`, 503, when too much of the client waits already.
        """
        return self._turns.turn(client)

    async def run(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return what a function of a module returns; its arguments and results travel between processes.

        Raises
        ------
        RefusedError
            What the function raised; 413, when it needs too much memory.
        """
        try:
            outcome = await asyncio.wrap_future(self._start().submit(_guard, function, arguments, named))
        except BrokenProcessPool:
            self._executor = None
            raise _too_costly() from None
        if isinstance(outcome, _Refusal):
            raise RefusedError(outcome.status, outcome.message)
        return outcome

    def close(self) -> None:
        """End the process when it has finished its present function."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None

    def _start(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # Spawned: a fork of the router would have its sockets, and its threads' locks as they were.
            self._executor = ProcessPoolExecutor(_PROCESSES, get_context("spawn"), _limit)
        return self._executor


def refuse_long_text(size: int) -> None:
    """Refuse a text that is too long to parse.

    Raises
    ------
    RefusedError
        413.
    """
    if size > MAX_TEXT_BYTES:
        message = f"the request has {size} bytes of text, more than {MAX_TEXT_BYTES}: send tensors as binary data"
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _guard(function: Callable[..., R], arguments: tuple[Any, ...], named: dict[str, Any]) -> R | _Refusal:
    try:
        return function(*arguments, **named)
    except RefusedError as refusal:
        return _Refusal(refusal.status, refusal.message)
    except (MemoryError, RecursionError):
        costly = _too_costly()
        return _Refusal(costly.status, costly.message)


def _too_costly() -> RefusedError:
    message = "the request's text takes too much memory to read: send tensors as binary data"
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _limit() -> None:
    """Have this process end with the router, not before, and limit its memory."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
