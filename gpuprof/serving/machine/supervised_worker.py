"""Supervises a worker: restarts its process whenever it ends, until the worker is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from gpuprof.errors import GpuprofError
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.watch.living_process import LivingProcess

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 10.0
#: Lifetime after which a worker is restarted without delay.
_LONG_LIFE_S = 30.0
#: Time limit for a worker to end by itself.
PATIENCE_S = 5.0

#: Starts the worker's process.
Start = Callable[[str, WorkerOrder], Awaitable[LivingProcess]]


class SupervisedWorker:
    """Keeps a worker running.

    Parameters
    ----------
    number : str
        The worker's number in the router.
    start : callable
        Starts its process; raises OSError, or GpuprofError when the process cannot have its share.
    on_exit : callable
        Receives the process id when a process has ended.
    on_refusal : callable
        Receives the reason why no process can be started.
    """

    def __init__(
        self,
        number: str,
        order: WorkerOrder,
        start: Start,
        on_exit: Callable[[str, int], None],
        on_refusal: Callable[[str, GpuprofError], None],
    ) -> None:
        self.number = number
        self.order = order
        self._start = start
        self._on_exit = on_exit
        self._on_refusal = on_refusal
        self._loop = asyncio.get_running_loop()
        self._process: LivingProcess | None = None
        self._began = 0.0
        self._failures = 0
        self._is_stopping = False
        self._next: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._has_no_process = asyncio.Event()
        self._has_no_process.set()

    def begin(self, living: LivingProcess | None = None) -> None:
        """Supervise a living process, or start a new one."""
        if living is None:
            self._starting = asyncio.ensure_future(self._start_process())
        else:
            self._watch_process(living)

    def kill(self, pid: int) -> None:
        """Kill the process if ``pid`` is still its id; another process is started."""
        if self._process is not None and self._process.pid == pid:
            self._process.kill()

    async def stop(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until the worker has ended, and kill it after ``patience_s``."""
        self._is_stopping = True
        if self._next is not None:
            self._next.cancel()
        if self._starting is not None:
            # A process that is just starting would be left without a supervisor: wait until it can be ended.
            await self._starting
        try:
            await asyncio.wait_for(self._has_no_process.wait(), patience_s)
        except TimeoutError:
            assert self._process is not None
            self._process.kill()
            await self._has_no_process.wait()

    async def _start_process(self) -> None:
        try:
            process = await self._start(self.number, self.order)
        except GpuprofError as error:
            self._on_refusal(self.number, error)
            self._schedule_restart()
        except OSError as error:
            self._on_refusal(self.number, GpuprofError(f"cannot start a process: {error.strerror or error}"))
            self._schedule_restart()
        else:
            self._watch_process(process)

    def _watch_process(self, process: LivingProcess) -> None:
        self._process = process
        self._began = time.monotonic()
        self._has_no_process.clear()
        self._loop.add_reader(process.fileno(), self._handle_exit)

    def _handle_exit(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        self._loop.remove_reader(process.fileno())
        process.release()
        self._on_exit(self.number, process.pid)
        self._has_no_process.set()
        self._schedule_restart()

    def _schedule_restart(self) -> None:
        if self._is_stopping:
            return
        lived_s = time.monotonic() - self._began if self._began else 0.0
        self._failures = 0 if lived_s > _LONG_LIFE_S else self._failures + 1
        delay = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (self._failures - 1)) if self._failures else 0.0
        self._next = self._loop.call_later(delay, self.begin)
