"""A quota on CPU time through Linux control groups, version 1 and 2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import UnavailableError

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "gpuprof-"
# A short period keeps batches even: with half a core and the kernel's period of 100 ms, a batch of 5 ms would run at
# full speed ten times and then pause for 50 ms.
_PERIOD_US = 10_000
# Limits of the kernel (kernel/sched/core.c): a quota of at least 1 ms, a period of at most 1 s.
_MIN_QUOTA_US = 1_000
_MAX_PERIOD_US = 1_000_000


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
        period = min(_MAX_PERIOD_US, max(_PERIOD_US, round(_MIN_QUOTA_US / cores)))
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


def quota_parent(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> tuple[Path, int]:
    """Return the parent control group for quotas, and the cgroup version.

    Raises `UnavailableError` when no control group is writable by this process.
    """
    candidates = [(path, version) for path, version in _cpu_groups(root, membership) if path.is_dir()]
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


def _cpu_groups(root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # ``hierarchy:controllers:path``; version 2 is the line without controllers (cgroups(7)).
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            # systemd mounts both controllers together and links the short name to the mount; containers often have only
            # the link or only the mount.
            for mount in ("cpu", "cpu,cpuacct", controllers):
                if (root / mount / "cpu.cfs_quota_us").exists() or (root / mount / "cgroup.procs").exists():
                    yield root / mount / path.lstrip("/"), 1
                    yield root / mount, 1
        elif not controllers and (root / "cgroup.controllers").exists():
            group = root / path.lstrip("/")
            # A version 2 group that contains processes cannot delegate the controller; its parent often can.
            yield from ((place, 2) for place in (group, *group.parents) if place == root or root in place.parents)


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
