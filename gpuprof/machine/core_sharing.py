"""Keeps processes other than workers off the workers' cores while other cores are free.

Router, machine process and load client wake up for every request. By default the scheduler resumes them on the core of
their last run, often a worker's, where they delay the running batch: by a few percent on average, far more at the 99th
percentile. When all cores compute, or the free cores do not suffice, the default scheduling applies;
`gpuprof.rules.host_work` models its cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Utilisation of the free cores above which this process also uses the workers' cores, and below which it leaves them.
#: Two thresholds are needed: with a single threshold, a load near it would move all threads to and fro every period.
_CROWDED, _ROOMY = 0.75, 0.4
_PERIOD_S = 2.0

_allowed: frozenset[int] | None = None


def allowed_cores() -> frozenset[int]:
    """Return the cores available to this process, including those currently avoided."""
    return frozenset(os.sched_getaffinity(0)) if _allowed is None else _allowed


def avoid_cores(cores: Collection[int]) -> bool:
    """Keep all threads of this process off ``cores``; return whether free cores were left.

    A further call starts again from all cores available to the process; an empty ``cores`` makes all of them usable
    again.
    """
    global _allowed
    all_cores = allowed_cores()
    free = all_cores - frozenset(cores)
    if _allowed is None and (not free or free == all_cores):
        return False
    _allowed = all_cores
    _set_all_threads(free or all_cores)
    return bool(free) and free != all_cores


@contextmanager
def avoiding_cores(cores: Collection[int]) -> Iterator[bool]:
    """Stay off ``cores`` inside the context; child processes started inside inherit this."""
    try:
        yield avoid_cores(cores)
    finally:
        avoid_cores(())


def _set_all_threads(cores: Collection[int]) -> None:
    # Affinity belongs to a thread: setting it for the process id moves the first thread only. New threads inherit the
    # affinity of their creator.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or the machine's cores have changed
            os.sched_setaffinity(int(thread.name), cores)


class CoreSharing:
    """Stays off the workers' cores as long as the free ones suffice for this process."""

    def __init__(self) -> None:
        self._taken: frozenset[int] = frozenset()
        self._is_off = False
        self._looked = time.monotonic()
        self._spent_s = time.process_time()

    def take(self, cores: Collection[int]) -> None:
        """Set the cores that workers compute on."""
        if self._taken != frozenset(cores):
            self._taken = frozenset(cores)
            self._is_off = avoid_cores(self._taken)

    def watch(self, now: float, spent_s: float | None = None) -> None:
        """Use the workers' cores too while the free cores are overloaded; to be called periodically.

        ``now``: monotonic seconds; ``spent_s``: CPU time of this process so far; measured unless given.
        """
        elapsed_s = now - self._looked
        if elapsed_s < _PERIOD_S:
            return
        spent_s = time.process_time() if spent_s is None else spent_s
        free = len(allowed_cores() - self._taken)
        part = (spent_s - self._spent_s) / elapsed_s / max(1, free)
        self._looked, self._spent_s = now, spent_s
        if self._is_off and part > _CROWDED:
            avoid_cores(())
            self._is_off = False
        elif not self._is_off and self._taken and free and part < _ROOMY:
            self._is_off = avoid_cores(self._taken)
