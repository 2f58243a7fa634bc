"""Scheduling priority of threads that must respond quickly on a shared CPU.

Where models are served from a CPU, the router and a load client of a few hundred microseconds a request stand in the
same queue as workers that compute for milliseconds. The system's default treats them alike: a router that wakes up
while every core computes waits for the end of somebody's slice, up to a tick of 4 ms. No privileges are needed; where
the kernel lacks what is asked for, nothing changes.

Workers stay as the system starts them. Marked as batch processes (SCHED_BATCH) they would wait for a tick themselves,
at every request, as soon as anything else runs on their core.
"""

from __future__ import annotations

import ctypes
import os
import struct

_SCHED_OTHER = 0
# By number: the C library has a function for it only from glibc 2.41 on.
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr, first version
_QUICK_SLICE_NS = 100_000  # the shortest that the kernel takes


def shorten_wakeup_latency() -> bool:
    """Request that this thread, when it wakes up, preempts threads with longer time slices.

    Returns
    -------
    bool
        Whether the kernel took the request. Slices of one's own exist from Linux 6.12 on; older kernels take it
        and ignore it.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # The slice goes where a deadline task has its run time; nice must be repeated, or it would become 0.
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, _QUICK_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0)
