"""Computes the bound with interference in a child process, in parallel with the search for maps.

That process imports numba, and compiles what no process of this machine compiled before, beside the search as well.
Bounds are read as they come: when the time is up, the highest so far holds. A process that still compiles then is left
to end by itself: what it compiles is kept for the next.
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO

from gpuprof.machine.cgroup_limits import cpu_quota_cores, usable_cores
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import compile_kernel
from gpuprof.runtime.module_command import module_command

_BOUND = struct.Struct("d")
#: The directory that the package lies in: the process must run the same.
_ROOT = Path(__file__).parents[3]


@dataclass(slots=True)
class BoundProcess:
    """A process that raises one bound."""

    _process: subprocess.Popen[bytes]
    _highest: float = 0.0
    _rest: bytes = b""
    _ended: bool = True  #: Nothing more is to be read; so too before there is a task.
    _compiles: bool = True

    def begin(self, task: BoundTask, limit: Limit) -> bool:
        """Give the process its task and the time that is left; whether it could take it."""
        # Workloads take longest to send, and are identified by their numbers there.
        kinds = [replace(kind, workloads=()) for kind in task.kinds]
        assert self._process.stdin is not None
        # Plug-ins may tell tables that cannot be sent.
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            content = pickle.dumps((replace(task, kinds=kinds), limit.left_s))
            # In a thread: more than a pipe holds waits until the process has come to read it.
            Thread(target=_send, args=(self._process.stdin, content), daemon=True).start()
            self._ended = False
        return not self._ended

    def wait(self, limit: Limit, enough: float) -> float:
        """Return the highest bound that the process finds in time, as soon as one is enough or there is none more."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not self._ended and self._highest < enough:
                wait_s = 0.0 if limit.is_over else limit.left_s
                if not selector.select(wait_s):
                    break
                self._read_bounds()
        return self._highest

    def _read_bounds(self) -> None:
        assert self._process.stdout is not None
        received = os.read(self._process.stdout.fileno(), 1 << 16)
        self._ended = not received
        self._rest += received
        self._compiles = False
        whole = len(self._rest) - len(self._rest) % _BOUND.size
        self._highest = max([self._highest, *(one for (one,) in _BOUND.iter_unpack(self._rest[:whole]))])
        self._rest = self._rest[whole:]

    def end(self) -> None:
        """End the process, or leave it to itself."""
        self.wait(Limit(0.0), math.inf)
        if self._compiles:
            self._process.returncode = 0  # nobody waits for it, which is meant
        else:
            self._process.kill()
        # The pipe of a process that still compiles is closed by the thread that sends the task.
        sends = self._compiles and not self._ended
        for stream in (None if sends else self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._process.wait()


def _send(stream: IO[bytes], content: bytes) -> None:
    with suppress(OSError, ValueError), stream:  # the process has ended, or was ended
        stream.write(content)


@contextmanager
def start_bound_process(*, wanted: bool) -> Iterator[BoundProcess | None]:
    """Give a process that waits for its task; None where none is wanted, or there is no core for it."""
    process = _start() if wanted and _count_cores() > 1 else None
    try:
        yield process
    finally:
        if process is not None:
            process.end()


def _start() -> BoundProcess | None:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    with suppress(OSError):
        started = subprocess.Popen(
            module_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends this process
        )
        return BoundProcess(started)
    return None


def _count_cores() -> int:
    return usable_cores(len(os.sched_getaffinity(0)), cpu_quota_cores())


def main() -> None:
    """Read a task, and write each bound that is higher than those before it, after one of 0 once all is compiled."""
    with ThreadPoolExecutor(1) as reader, suppress(BrokenPipeError, EOFError):
        # Read meanwhile: a sender of more than a pipe holds blocks.
        content = reader.submit(sys.stdin.buffer.read)
        compile_kernel()
        _write(0.0)
        task, seconds = pickle.loads(content.result())
        for bound in NeighbourBound(task).raise_bound(Limit(seconds)):
            if math.isfinite(bound):
                _write(bound)


def _write(bound: float) -> None:
    os.write(sys.stdout.fileno(), _BOUND.pack(bound))


if __name__ == "__main__":
    main()
