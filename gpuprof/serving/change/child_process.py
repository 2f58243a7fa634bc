"""Runs a function in a child process, so that its computation does not delay requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from gpuprof.errors import GpuprofError, UnavailableError

_Result = TypeVar("_Result")
#: Niceness: on a CPU, planning shares the cores with the workers.
_NICE = 5


async def run_in_process(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Return the result of ``function`` for ``arguments``; function, arguments and result must be picklable.

    Raises the function's `GpuprofError`, and `UnavailableError` for any other error or the death of the process.
    """
    # Spawned: a fork would have the router's sockets, and its threads' locks as they were.
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call_and_send, args=(theirs, function, arguments), daemon=True)
    try:
        await asyncio.to_thread(process.start)
        # Or `recv` would never see the end of the process: the router would hold a writing end itself.
        theirs.close()
        result, error = await asyncio.to_thread(ours.recv)
    except EOFError:
        raise UnavailableError("the process that was to compute ended meanwhile") from None
    finally:
        if process.pid is not None:
            process.kill()
            await asyncio.to_thread(process.join)
    if error is not None:
        raise error
    answer: _Result = result
    return answer


def _call_and_send(pipe: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    with suppress(OSError):
        os.nice(_NICE)
    answer: tuple[Any, GpuprofError | None]
    try:
        answer = function(*arguments), None
    except GpuprofError as error:
        answer = None, error
    except Exception as error:  # no error here may end the server
        answer = None, UnavailableError(f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):
        pipe.send(answer)
