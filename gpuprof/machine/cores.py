"""Cores of this machine: scheduling of processes that must respond quickly beside workers, and use by all programs.

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


# System call by number: the C library wraps it only from glibc 2.41 on.
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr, first version
_QUICK_SLICE_NS = 100_000  # shortest slice accepted by the kernel


def shorten_wakeup_latency() -> bool:
    """Request that this thread preempts threads with longer time slices; return whether the kernel accepted that.

    Custom slices exist from Linux 6.12 on; older kernels accept and ignore the request.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # The slice goes into the field of a deadline task's run time; nice must be repeated, otherwise it would become 0.
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _QUICK_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0)


_ALL = "cpu"  # the kernel's sum over all cores


class MachineLoad:
    """Use of some cores, and of the whole machine, from its creation on.

    A process that becomes runnable while the hypervisor has descheduled its virtual core waits for milliseconds: little
    on average, but it determines the 99th percentile of a latency.

    ``stat``: path of the kernel's counters.
    """

    def __init__(self, cores: Collection[int] = (), stat: Path = Path("/proc/stat")) -> None:
        self._cores, self._stat = tuple(cores), stat
        self._before = _read_times(stat)

    def stolen_part(self) -> float | None:
        """Return the fraction of the machine's time that was stolen since the beginning; None without counters."""
        before, after = self._before.get(_ALL), _read_times(self._stat).get(_ALL)
        if before is None or after is None or after[1] <= before[1]:
            return None
        return (after[2] - before[2]) / (after[1] - before[1])

    def describe_disturbance(self, own_cores: float | None, tolerance: float) -> str | None:
        """Return a remark on programs, or a hypervisor, that took more than a part ``tolerance`` of the cores' time.

        ``own_cores``: cores kept busy by the measurement itself; None: other programs do not matter, as on a GPU.
        """
        ticks, stolen = self._count_ticks(), self.stolen_part()
        if ticks is not None and own_cores is not None:
            busy, total = ticks
            # Each core's counter is rounded to a tick.
            foreign = busy - own_cores * total / len(self._cores) - len(self._cores)
            if foreign > tolerance * total:
                cores = foreign / total * len(self._cores)
                return (
                    f"other programs kept {cores:.1f} of the {len(self._cores)} cores busy meanwhile "
                    f"(load average {os.getloadavg()[0]:.1f})"
                )
        if stolen is not None and stolen > tolerance:
            return f"the hypervisor gave {100.0 * stolen:.0f}% of this machine's time to others meanwhile"
        return None

    def _count_ticks(self) -> tuple[int, int] | None:
        """Return the busy ticks and all ticks of the cores since the beginning."""
        after = _read_times(self._stat)
        names = [name for core in self._cores if (name := f"cpu{core}") in self._before and name in after]
        busy, total = (sum(after[name][place] - self._before[name][place] for name in names) for place in (0, 1))
        return (busy, total) if total > 0 else None


def _read_times(stat: Path) -> dict[str, tuple[int, int, int]]:
    """Return (busy, all, stolen) ticks of each core, and of all cores together."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    times = {}
    for line in lines:
        name, *fields = line.split() or [""]
        if name.startswith(_ALL) and len(fields) >= 8 and all(field.isdigit() for field in fields[:8]):
            # Columns of proc(5); guest time follows, and is contained in the first two.
            user, nice, system, idle, iowait, irq, softirq, stolen = map(int, fields[:8])
            busy = user + nice + system + irq + softirq
            times[name] = (busy, busy + idle + iowait + stolen, stolen)
    return times
