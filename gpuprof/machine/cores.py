"""Scheduling of processes that must respond quickly on the CPU that workers compute on.

Router, machine process and load client need a few hundred microseconds a request. By default the scheduler resumes them
on the core of their last run, often a worker's, where they delay the running batch: by a few percent on average, far
more at the 99th percentile. So they stay off the workers' cores while other cores are free. When all cores compute, the
default scheduling applies, whose cost `gpuprof.rules.host_work` models, and short time slices let them preempt workers,
which would otherwise run until the end of a slice, up to a tick of 4 ms.

Workers keep the default policy. As batch processes (SCHED_BATCH) they would wait for a tick at every request whenever
anything else runs on their core.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


_SCHED_OTHER = 0
# System call by number: the C library wraps it only from glibc 2.41 on.
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr, first version
_QUICK_SLICE_NS = 100_000  # shortest slice accepted by the kernel


def shorten_wakeup_latency() -> bool:
    """Request that this thread preempts threads with longer time slices on wake-up.

    Returns
    -------
    bool
        True if the kernel accepted the request. Custom slices exist from Linux 6.12 on; older kernels accept and ignore
        the request.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # The slice goes into the field of a deadline task's run time; nice must be repeated, otherwise it would become 0.
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, _QUICK_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0)
