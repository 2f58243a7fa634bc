"""Holds processes to their share of a CPU: whole cores by affinity, fractions of a core by a cgroup's quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpuprof.errors import UnavailableError
from gpuprof.machine.cgroup import CpuQuota, cpu_quota_cores, usable_cores
from gpuprof.machine.core_sharing import allowed_cores
from gpuprof.rules.cpu_slices import CpuSlice


def own_cores() -> tuple[int, ...]:
    """Return the cores that this process can keep busy, sorted: as many of its allowed cores as its quota permits."""
    allowed = sorted(allowed_cores())
    return tuple(allowed[: usable_cores(len(allowed), cpu_quota_cores())])


@contextmanager
def confine_to_share(part: CpuSlice, name: str) -> Iterator[None]:
    """Hold this process, and all threads started inside the context, to ``part``.

    ``name``: name of the quota's cgroup: processes with the same name share the quota. Raises `UnavailableError`
    when a core is not available to this process, or no cgroup quota can be set here.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, part.cores)
    except OSError as error:
        raise UnavailableError(
            f"cannot run on cores {','.join(map(str, part.cores))}: {error.strerror}",
            f"this process may use {','.join(map(str, sorted(before)))}",
        ) from error
    try:
        if part.quota_cores is None:
            yield
        else:
            with CpuQuota.enter(name, part.quota_cores):
                yield
    finally:
        os.sched_setaffinity(0, before)
