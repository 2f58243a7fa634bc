"""Reads the limits that control groups, version 1 and 2, set on this process: CPU time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

# Version 1 expresses "no limit" by the largest multiple of the page size that fits into 63 bits.
_UNLIMITED_BYTES = 2**62


def cgroup_version(root: Path = Path("/")) -> int | None:
    """Return the version (2 or 1) of the control groups for CPU time here, or None without control groups.

    ``root``: root of the file system.
    """
    mount = root / "sys/fs/cgroup"
    if (mount / "cgroup.controllers").exists():
        return 2
    return 1 if next(_list_mounts(mount, "cpu"), None) else None


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process in cores, or None without one."""
    quotas = [quota for group in _list_own_groups(root, "cpu") if (quota := _read_quota(group)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this process's control groups, or None without one."""
    limits = [limit for group in _list_own_groups(root, "memory") if (limit := _read_memory(group)) is not None]
    return min(limits, default=None)


def usable_cores(processors: int, quota_cores: float | None) -> int:
    """Return the number of processors a process on ``processors`` can keep busy under this quota."""
    return processors if quota_cores is None else max(1, min(processors, math.ceil(quota_cores)))


def _list_own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's group of the controller and all its ancestors, whose limits apply too."""
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            for base in _list_mounts(mount, controller):
                yield from _list_upwards(base, path)
        elif not controllers and (mount / "cgroup.controllers").exists():
            yield from _list_upwards(mount, path)


def _list_mounts(mount: Path, controller: str) -> Iterator[Path]:
    for name in (controller, "cpu,cpuacct" if controller == "cpu" else controller):
        if (mount / name / "cgroup.procs").exists():
            yield mount / name
            return


def _list_upwards(base: Path, path: str) -> Iterator[Path]:
    # A container sees its host's path but has its own mount, with only the mount's root inside.
    group = base / path.lstrip("/")
    yield from (place for place in (group, *group.parents) if place == base or base in place.parents)


def _read_quota(group: Path) -> float | None:
    words = read_text(group / "cpu.max").split()
    if len(words) == 2:
        quota, period = words
    else:
        quota, period = read_text(group / "cpu.cfs_quota_us").strip(), read_text(group / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read_memory(group: Path) -> int | None:
    text = read_text(group / "memory.max").strip() or read_text(group / "memory.limit_in_bytes").strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def read_text(path: Path) -> str:
    """Return the content of a kernel file; empty if the file is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
