"""Computes the bound with interference in a child process, in parallel with the search for maps.

That process imports numba, and compiles what no process of this machine compiled before, beside the search as well.
It writes lines of JSON: bounds, of which the highest so far holds when the time is up, and now and then what a map may
be made of by what it knows then (`gpuprof.placement.optimal.capacity_program`). A process that still compiles is left
to end by itself: what it compiles is kept for the next.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, Any

from gpuprof.machine.cgroup_limits import cpu_quota_cores, usable_cores
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import capacity_program
from gpuprof.placement.optimal.capacity_program import (
    CapacityColumns,
    CapacityPattern,
    CapacitySplit,
    choose_columns,
)
from gpuprof.placement.optimal.neighbour_bound import BoundTask, NeighbourBound
from gpuprof.placement.optimal.neighbour_box import compile_kernel
from gpuprof.runtime.module_command import module_command

#: Part of the time after which it says what maps may be made of, which take some, too; part after which it looks again,
#: and seconds at least where it has said it. Not while the relaxation costs more than this multiple of the bound: both
#: have far to go then.
_COLUMNS_AT, _COLUMNS_AGAIN, _LEAST_AGAIN_S, _NEAR = 0.28, 0.08, 1.5, 1.06
#: A relaxation that costs less by no more than this part makes no better maps.
_LITTLE = 5e-4
#: So often it is looked whether it has.
_LOOK_S = 0.05
#: The directory that the package lies in: the process must run the same.
_ROOT = Path(__file__).parents[3]


@dataclass(slots=True)
class BoundProcess:
    """A process that raises one bound."""

    _process: subprocess.Popen[bytes]
    _highest: float = 0.0
    _columns: CapacityColumns | None = None  #: What a map may be made of, since it was asked for last.
    _looked: float = 0.0
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
        self._read_until(limit, lambda: self._highest >= enough)
        return self._highest

    def has_columns(self) -> bool:
        """Whether the process has said what a map may be made of, some hundredths of a second ago; asked often."""
        now = time.monotonic()
        if self._columns is None and now > self._looked + _LOOK_S:
            self._looked = now
            self._read_until(Limit(0.0), lambda: False)
        return self._columns is not None

    def take_columns(self, limit: Limit, enough: float) -> CapacityColumns | None:
        """Return what a map may be made of, if the process has said more of it since this was asked last.

        None when the time is up, or the bound reaches ``enough``, or it says no more.
        """
        self._read_until(limit, lambda: self._columns is not None or self._highest >= enough)
        taken, self._columns = self._columns, None
        return None if self._highest >= enough else taken

    def _read_until(self, limit: Limit, is_enough: Callable[[], bool]) -> None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not (self._ended or is_enough()):
                if not selector.select(0.0 if limit.is_over else limit.left_s):
                    break
                self._read_lines()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        received = os.read(self._process.stdout.fileno(), 1 << 16)
        self._ended = not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        self._compiles = self._compiles and not lines
        for told in map(json.loads, lines):
            if isinstance(told, float):
                self._highest = max(self._highest, told)
            else:
                self._columns = _read_columns(*told)

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
    """Read a task, and write the highest bound after each round, after one of 0 once all is compiled."""
    with ThreadPoolExecutor(1) as reader, suppress(BrokenPipeError, EOFError):
        # Read meanwhile: a sender of more than a pipe holds blocks.
        content = reader.submit(sys.stdin.buffer.read)
        compile_kernel()
        capacity_program.compile_kernel()
        _write(0.0)
        task, seconds = pickle.loads(content.result())
        limit, bound = Limit(seconds), NeighbourBound(task)
        whole_s = seconds or 0.0
        due_s, least = _COLUMNS_AT * whole_s if task.for_maps else math.inf, math.inf
        for cost in bound.raise_bound(limit):
            if math.isfinite(cost):
                _write(cost)
            if limit.spent_s >= due_s:
                least = _write_columns(bound, limit, least, _NEAR * cost)
                waits_s = _COLUMNS_AGAIN * whole_s
                due_s = limit.spent_s + (waits_s if least == math.inf else max(waits_s, _LEAST_AGAIN_S))
        if task.for_maps and not limit.is_over:
            _write_columns(bound, limit, least, math.inf)


def _write_columns(bound: NeighbourBound, limit: Limit, least: float, near: float) -> float:
    """Write what maps may be made of if its relaxation costs less than ``least`` and ``near``; return the least now."""
    columns = choose_columns(bound.task.kinds, bound.task.demands, bound.rank_patterns(), limit)
    if columns is None or columns.cost > min(near, least * (1.0 - _LITTLE)):
        return least
    patterns = [(one.kind, one.items, one.classes, one.parts) for one in columns.patterns]
    splits = [(one.number, one.parts) for one in columns.splits]
    _write((patterns, splits, columns.taken, columns.cost))
    return columns.cost


def _read_columns(patterns: Iterable[Any], splits: Iterable[Any], taken: Sequence[int], cost: float) -> CapacityColumns:
    return CapacityColumns(
        tuple(CapacityPattern(kind, *map(tuple, own)) for kind, *own in patterns),
        tuple(CapacitySplit(number, tuple(parts)) for number, parts in splits),
        (taken[0], taken[1]),
        cost,
    )


def _write(told: object) -> None:
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
