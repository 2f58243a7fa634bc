from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.machine.cgroup import CpuQuota, quota_parent

GROUPS = "sys/fs/cgroup"


def _v1(machine: Path) -> None:
    root = machine / "sys/fs/cgroup"
    (root / "cpu").mkdir(parents=True)
    for name in ("cgroup.procs", "cpu.cfs_quota_us"):
        (root / "cpu" / name).touch()


def _v2(root: Path, controllers: str, handed_on: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text(handed_on)


def _own(machine: Path, text: str) -> Path:
    (machine / "proc/self").mkdir(parents=True)
    (machine / "proc/self/cgroup").write_text(text)
    return machine


def test_version_1_is_found_where_the_cpu_controller_is_mounted(tmp_path: Path) -> None:
    _v1(tmp_path)
    quota = quota_parent(_own(tmp_path, "3:cpuset:/\n1:cpu:/\n0::/\n"))
    assert quota == (tmp_path / GROUPS / "cpu", 1)


def test_version_2_takes_the_own_group_when_it_hands_the_controller_on(tmp_path: Path) -> None:
    _v2(tmp_path / GROUPS, "cpu memory", "")
    _v2(tmp_path / GROUPS / "app", "cpu memory", "cpu")
    quota = quota_parent(_own(tmp_path, "0::/app\n"))
    assert quota == (tmp_path / GROUPS / "app", 2)


def test_version_2_goes_up_to_the_group_that_can(tmp_path: Path) -> None:
    _v2(tmp_path / GROUPS, "cpu memory", "cpu")
    _v2(tmp_path / GROUPS / "app", "memory", "")
    assert quota_parent(_own(tmp_path, "0::/app\n")) == (tmp_path / GROUPS, 2)


def test_where_there_is_none_the_fix_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="whole cores"):
        quota_parent(_own(tmp_path, "0::/\n"))


@pytest.mark.parametrize(("cores", "limit"), [(0.5, "5000 10000"), (1.5, "15000 10000"), (0.05, "1000 20000")])
def test_quotas_are_written_as_the_kernel_wants_them(tmp_path: Path, cores: float, limit: str) -> None:
    CpuQuota(tmp_path, 2)._limit(cores)
    assert (tmp_path / "cpu.max").read_text() == limit
    CpuQuota(tmp_path, 1)._limit(cores)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == limit.split()[0]
    assert (tmp_path / "cpu.cfs_period_us").read_text() == limit.split()[1]
