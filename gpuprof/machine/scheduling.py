"""Scheduling priority of threads that must respond quickly on a shared CPU.

When models are served on a CPU, the router and a load client need a few hundred microseconds a request, but compete
with workers that compute for milliseconds. The default scheduler treats them alike: a router that wakes up while every
core computes waits until a worker's slice ends, up to a tick of 4 ms. No privileges are needed; on a kernel without
this feature nothing changes.

Workers keep the default policy. As batch processes (SCHED_BATCH) they would wait for a tick at every request whenever
anything else runs on their core.
"""

from __future__ import annotations

import ctypes
import os
import struct

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
