"""Supervises a process: starts another whenever it ends, until it is stopped."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpuprof.errors import GpuprofError

#: Delay of a restart, doubled after each short life up to the maximum; a process that lived for longer than the maximum
#: is restarted at once.
FIRST_DELAY_S, MAX_DELAY_S = 0.05, 10.0


class SupervisedProcess:
    """Keeps a process running.

    ``start``: starts the process; raises OSError, or GpuprofError when the process cannot have its share; ``on_exit``:
    receives the process id when a process has ended; ``on_failure``: receives the reason why no process can be started.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[LivingProcess]],
        on_exit: Callable[[int], None],
        on_failure: Callable[[GpuprofError], None],
    ) -> None:
        self._start = start
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._process: LivingProcess | None = None
        self._began = time.monotonic()
        self._delay_s = 0.0
        self.is_stopping = False
        self._next: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._has_no_process = asyncio.Event()
        self._has_no_process.set()

    def begin(self, process: LivingProcess | None = None) -> None:
        """Supervise a living process, or start a new one."""
        if process is None:
            self._starting = asyncio.ensure_future(self._start_process())
        else:
            self._watch_process(process)

    def kill(self, pid: int | None = None) -> None:
        """Kill the process, if ``pid`` is None or still its id; another process is started."""
        if self._process is not None and pid in (None, self._process.pid):
            self._process.kill()

    async def stop(self, patience_s: float) -> None:
        """Wait until the process has ended, and kill it after ``patience_s``."""
        self.is_stopping = True
        if self._next is not None:
            self._next.cancel()
        if self._starting is not None:
            # A process that is just starting would be left without a supervisor: wait until it can be ended.
            await self._starting
        try:
            await asyncio.wait_for(self._has_no_process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._has_no_process.wait()

    async def _start_process(self) -> None:
        if self.is_stopping:  # since this task was scheduled
            return
        self._began = time.monotonic()
        try:
            process = await self._start()
        except GpuprofError as error:
            self._on_failure(error)
        except OSError as error:
            self._on_failure(GpuprofError(f"cannot start a process: {error.strerror or error}"))
        else:
            self._watch_process(process)
            return
        self._schedule_restart()

    def _watch_process(self, process: LivingProcess) -> None:
        self._process = process
        self._has_no_process.clear()
        self._loop.add_reader(process.fileno(), self._handle_exit)

    def _handle_exit(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        self._loop.remove_reader(process.fileno())
        process.release()
        self._on_exit(process.pid)
        self._has_no_process.set()
        self._schedule_restart()

    def _schedule_restart(self) -> None:
        if self.is_stopping:
            return
        if time.monotonic() - self._began > MAX_DELAY_S:
            self._delay_s = 0.0
        self._next = self._loop.call_later(self._delay_s, self.begin)
        self._delay_s = min(MAX_DELAY_S, max(FIRST_DELAY_S, 2.0 * self._delay_s))


class LivingProcess:
    """Refers to a process by a descriptor, which stays valid when its id is given to another process.

    Raises `OSError` when there is no such process.

    ``child``: the process, where this process started it.
    """

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._descriptor = os.pidfd_open(pid)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        text: str,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> LivingProcess:
        """Start a program that inherits ``descriptors``, and reads ``text`` from its input.

        Secrets go there, since all users can read the arguments of a process. Raises `OSError`.
        """
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=pipe, stdout=null, env=environment)
        assert process.stdin is not None
        with process.stdin as file:
            file.write(text.encode())
        return cls(process.pid, process)

    @classmethod
    def adopt(cls, pid: int, started: int) -> LivingProcess | None:
        """Return the process with this id and start time; None when it has ended."""
        try:
            process = cls(pid)
        except OSError:
            return None
        if start_time(pid) == started:
            return process
        process.release()
        return None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""
        return self._descriptor

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return bool(select.select([self._descriptor], [], [], 0.0)[0])

    def kill(self) -> None:
        """Kill the process; no error when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def release(self) -> None:
        """Close the descriptor."""
        if self._child is not None:
            self._child.wait()
        os.close(self._descriptor)


def start_time(pid: int) -> int:
    """Return the start time of a process, in the kernel's clock ticks since the boot; -1 when there is none."""
    try:
        # Fields after the last bracket: the name in brackets may itself hold spaces and brackets (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return -1
    return int(fields[19])
