"""A process beside the router, in which functions run that would hold the interpreter's lock for long."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.serving.transport.inference import RefusedError

P = ParamSpec("P")
R = TypeVar("R")


class SideProcess:
    """Runs functions of modules, one at a time; the process is started at the first use, and again after its death.

    ``niceness``: added to the process's, where its computation should not delay other processes.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of a function; function, arguments and result must be picklable.

        Raises the function's `GpuprofError` or `RefusedError`, and `UnavailableError` for any other error or the death
        of the process.
        """
        async with self._turn:
            pipe = self._start()
            try:
                result, error = await asyncio.to_thread(_exchange, pipe, (function, arguments, named))
            except (EOFError, OSError):
                self.close()
                raise UnavailableError("the process that was to compute ended meanwhile") from None
            except asyncio.CancelledError:
                self.close()  # or the next caller would receive this answer
                raise
        if error is not None:
            raise error
        answer: R = result
        return answer

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _start(self) -> Connection:
        if self._pipe is None:
            # Spawned: a fork would have the router's sockets, and its threads' locks as they were.
            context = get_context("spawn")
            self._pipe, child_end = context.Pipe()
            self._process = context.Process(target=_serve_calls, args=(child_end, self._niceness), daemon=True)
            self._process.start()
            child_end.close()  # held here as well, the end of the process would go unnoticed
        return self._pipe


def _exchange(pipe: Connection, call: object) -> Any:
    pipe.send(call)
    return pipe.recv()


def _serve_calls(pipe: Connection, niceness: int) -> None:
    """Run functions until the router has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(niceness)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_call(*pipe.recv()))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    try:
        return function(*arguments, **keywords), None
    except (GpuprofError, RefusedError) as error:
        return None, error
    except Exception as error:  # no error here may end the process
        return None, UnavailableError(f"{type(error).__name__}: {error}")
