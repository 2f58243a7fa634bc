"""Shares of a CPU: whole cores by affinity, fractions of a core by the quota of a Linux control group (v1 or v2)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import UnavailableError
from gpuprof.machine.cores import allowed_cores
from gpuprof.rules.cpu_slices import CpuSlice

_PREFIX = "gpuprof-"
# A short period keeps batches even: with half a core and the kernel's period of 100 ms, a batch of 5 ms would run at
# full speed ten times and then pause for 50 ms. The kernel (kernel/sched/core.c) wants a quota of at least 1 ms.
_PERIOD_US, _MIN_QUOTA_US = 10_000, 1_000


def cgroup_version(root: Path = Path("/")) -> int | None:
    """Return the version (2 or 1) of the control groups for CPU time here, or None without control groups.

    ``root``: root of the file system.
    """
    mount = root / "sys/fs/cgroup"
    if (mount / "cgroup.controllers").exists():
        return 2
    return 1 if any((path / "cgroup.procs").exists() for path in (mount / "cpu", mount / "cpu,cpuacct")) else None


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process in cores, or None without one."""
    quotas = [quota for group, _ in _list_groups(root, "cpu") if (quota := _read_quota(group)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this process's control groups, or None without one."""
    limits = [limit for group, _ in _list_groups(root, "memory") if (limit := _read_memory(group)) is not None]
    return min(limits, default=None)


def usable_cores(processors: int, quota_cores: float | None) -> int:
    """Return the number of processors a process on ``processors`` can keep busy under this quota."""
    return processors if quota_cores is None else max(1, min(processors, math.ceil(quota_cores)))


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """A control group of this process's own that caps its CPU time."""

    path: Path  #: Directory of the group.
    version: int  #: 1 or 2.

    @classmethod
    @contextmanager
    def enter(cls, name: str, cores: float) -> Iterator[CpuQuota]:
        """Move this process into the group ``name`` with a quota of ``cores`` cores, and back on exit.

        Processes that enter the same name share the quota; the last process to leave removes the group. If the name
        begins with the creator's process id and a dash, other processes remove the group after the creator was killed.
        Raises `UnavailableError` when no group can be created here.
        """
        parent, version = quota_parent()
        _remove_empty_groups(parent)
        group = cls(parent / _directory(name), version)
        try:
            group.path.mkdir(exist_ok=True)
            group._limit(cores)
            (group.path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            group._remove()
            raise _unavailable(f"{group.path}: {error.strerror}") from error
        try:
            yield group
        finally:
            # A group with processes cannot be removed, so this process leaves first.
            with suppress(OSError):
                (parent / "cgroup.procs").write_text(str(os.getpid()))
            group._remove()

    def _limit(self, cores: float) -> None:
        period = max(_PERIOD_US, round(_MIN_QUOTA_US / cores))
        quota = max(_MIN_QUOTA_US, round(cores * period))
        if self.version == 2:
            (self.path / "cpu.max").write_text(f"{quota} {period}")
        else:
            # Version 1 has a file for each of the two.
            (self.path / "cpu.cfs_period_us").write_text(str(period))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))

    def _remove(self) -> None:
        # rmdir works although the directory has files: they belong to the kernel.
        with suppress(OSError):  # still in use by other processes, or never created
            self.path.rmdir()


def remove_group(name: str) -> None:
    """Remove the group ``name``, if left behind by killed processes."""
    with suppress(UnavailableError, OSError):
        (quota_parent()[0] / _directory(name)).rmdir()


def quota_parent(root: Path = Path("/")) -> tuple[Path, int]:
    """Return the parent control group for quotas, and the cgroup version.

    Raises `UnavailableError` when no control group is writable by this process.
    """
    candidates = [(path, version) for path, version in _list_groups(root, "cpu") if path.is_dir()]
    for path, version in candidates:
        if os.access(path, os.W_OK) and (version == 1 or _delegates_cpu(path)):
            return path, version
    tried = ", ".join(dict.fromkeys(str(path) for path, _ in candidates)) or "no cpu controller is mounted"
    raise _unavailable(tried)


def _remove_empty_groups(parent: Path) -> None:
    """Remove empty groups of processes that were killed before they could remove them."""
    for path in parent.glob(f"{_PREFIX}[0-9]*-*"):
        maker = path.name.removeprefix(_PREFIX).split("-", 1)[0]
        if maker.isdecimal() and not Path("/proc", maker).exists():
            with suppress(OSError):
                path.rmdir()


def _directory(name: str) -> str:
    return _PREFIX + re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def _list_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield this process's group of the controller and all its ancestors, whose limits apply too, and the version.

    A container sees its host's path but has its own mount, often with only the mount's root inside. A version 2 group
    that contains processes cannot delegate a controller; its parent often can.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        # ``hierarchy:controllers:path``; version 2 is the line without controllers (cgroups(7)).
        _, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        base, version = mount, 2
        if controller in controllers.split(","):
            # systemd mounts controllers together and links the short name to the mount; containers often have only the
            # link or only the mount.
            names = (controller, "cpu,cpuacct" if controller == "cpu" else controller, controllers)
            base = next((mount / name for name in names if (mount / name / "cgroup.procs").exists()), Path())
            version = 1
        elif controllers or not (mount / "cgroup.controllers").exists():
            continue
        group = base / path.lstrip("/")
        yield from ((place, version) for place in (group, *group.parents) if place == base or base in place.parents)


def _read_quota(group: Path) -> float | None:
    words = read_text(group / "cpu.max").split()
    if len(words) != 2:  # version 1 has a file for each of the two
        words = [read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = words
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read_memory(group: Path) -> int | None:
    text = read_text(group / "memory.max").strip() or read_text(group / "memory.limit_in_bytes").strip()
    # Version 1 expresses "no limit" by the largest multiple of the page size that fits into 63 bits.
    return int(text) if text.isdigit() and int(text) < 1 << 62 else None


def read_text(path: Path) -> str:
    """Return the content of a kernel file; empty if the file is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _delegates_cpu(path: Path) -> bool:
    control = path / "cgroup.subtree_control"
    try:
        # A version 2 child has ``cpu.max`` only if its parent lists the controller here.
        if "cpu" in control.read_text().split():
            return True
        if "cpu" not in (path / "cgroup.controllers").read_text().split():
            return False
        control.write_text("+cpu")
    except OSError:
        return False
    return True


def _unavailable(tried: str) -> UnavailableError:
    return UnavailableError(
        f"cannot hold a fraction of a core: no writable control group for CPU time (tried {tried})",
        "use shares that are whole cores, or run where cgroups can be written",
    )


def own_cores() -> tuple[int, ...]:
    """Return the cores that this process can keep busy, sorted: as many of its allowed cores as its quota permits."""
    allowed = sorted(allowed_cores())
    return tuple(allowed[: usable_cores(len(allowed), cpu_quota_cores())])


@contextmanager
def confine_to_share(part: CpuSlice, name: str) -> Iterator[None]:
    """Hold this process, and all threads started inside the context, to the slice ``part``.

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
