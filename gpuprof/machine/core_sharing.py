"""Keeps processes other than workers off the workers' cores while other cores are free.

Router, machine process and load client wake up for every request. Left to the system they run where they ran last, on
the workers' cores too, and the batch that runs there ends so much later: by a few percent on average, by far more at
the 99th percentile. Where every core computes, or what is free does not suffice, they go where the system sends them;
`gpuprof.rules.host_work` counts what that costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: So much of the free cores' time this process may take; above it the workers' idle time is needed, too. Two
#: thresholds: with one, a load near it would move all threads to and fro every period.
_CROWDED, _ROOMY = 0.75, 0.4
_PERIOD_S = 2.0

_allowed: frozenset[int] | None = None


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may run on, including those that it currently avoids."""
    return frozenset(os.sched_getaffinity(0)) if _allowed is None else _allowed


def avoid_cores(taken: Collection[int]) -> bool:
    """Keep all threads of this process off the cores ``taken``; return whether others were left to run on.

    Called again it counts from all cores that the process was given; without ``taken`` it may use all of them again.
    """
    global _allowed
    everything = allowed_cores()
    free = everything - frozenset(taken)
    if _allowed is None and (not free or free == everything):
        return False
    _allowed = everything
    _set_all_threads(free or everything)
    return bool(free) and free != everything


@contextmanager
def avoiding_cores(taken: Collection[int]) -> Iterator[bool]:
    """Stay off the cores ``taken`` inside; processes that are started there do so, too."""
    try:
        yield avoid_cores(taken)
    finally:
        avoid_cores(())


def _set_all_threads(cores: Collection[int]) -> None:
    # Affinity belongs to a thread: setting that of the process's id moves its first thread alone. Threads that
    # start later inherit it from the one that starts them.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile, or the machine's cores are others now
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
        """Use the workers' cores, too, while the free ones are overloaded; to be called periodically.

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
