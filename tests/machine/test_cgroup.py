from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.cgroup import CpuQuota, confine_to_share, own_cores, quota_parent
from gpuprof.rules.cpu_slices import CpuSlice, plan_slices

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


@pytest.mark.parametrize(("cores", "limit"), [(0.5, "5000 10000"), (1.5, "15000 10000"), (0.05, "1000 20000")])
def test_quotas_are_written_as_the_kernel_wants_them(tmp_path: Path, cores: float, limit: str) -> None:
    CpuQuota(tmp_path, 2)._limit(cores)
    assert (tmp_path / "cpu.max").read_text() == limit
    CpuQuota(tmp_path, 1)._limit(cores)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == limit.split()[0]
    assert (tmp_path / "cpu.cfs_period_us").read_text() == limit.split()[1]


def _quota_reason() -> str:
    try:
        quota_parent()
    except UnavailableError as error:
        return str(error)
    return ""


def test_whole_cores_are_nobody_elses() -> None:
    assert plan_slices([50, 50], [0, 1]) == (CpuSlice((0,)), CpuSlice((1,)))
    assert plan_slices([100], [3, 5]) == (CpuSlice((3, 5)),)


@pytest.mark.parametrize("shares", [[0.0], [-1.0], [101.0], [60.0, 50.0], [float("nan")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(InputError):
        plan_slices(shares, [0, 1])


@given(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=12), st.integers(1, 16))
def test_slices_give_what_was_asked_and_never_more_than_a_core(weights: list[float], cores: int) -> None:
    shares = [100.0 * weight / max(100.0, sum(weights)) for weight in weights]
    slices = plan_slices(shares, range(cores))
    whole = [core for part in slices for core in part.cores if part.quota_cores is None]
    assert len(whole) == len(set(whole))
    for share, part in zip(shares, slices, strict=True):
        assert part.amount_cores == pytest.approx(share * cores / 100.0, abs=1e-4)
        assert len(part.cores) >= part.threads or part.amount_cores <= len(part.cores) + 1e-4
        assert part.cores


def test_confining_changes_the_cores_only_inside() -> None:
    before = os.sched_getaffinity(0)
    with confine_to_share(CpuSlice((own_cores()[0],)), "test"):
        assert os.sched_getaffinity(0) == {own_cores()[0]}
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnavailableError, match="cannot run on cores 9999"), confine_to_share(CpuSlice((9999,)), "test"):
        pass


@pytest.mark.skipif(bool(_quota_reason()), reason=_quota_reason())
def test_a_quota_holds_a_busy_loop_to_its_part_of_a_core() -> None:
    with confine_to_share(CpuSlice((own_cores()[0],), 0.25), "test-quota"):
        cpu, wall = time.process_time(), time.monotonic()
        while time.monotonic() - wall < 0.4:
            pass
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert used < 0.45  # without the quota it would be 1 on an idle machine
    assert not (quota_parent()[0] / "gpuprof-test-quota").exists()


@pytest.mark.skipif(bool(_quota_reason()), reason=_quota_reason())
def test_groups_of_makers_that_are_gone_are_swept_away() -> None:
    parent, _ = quota_parent()
    stale, alive = parent / "gpuprof-4194305-x", parent / f"gpuprof-{os.getpid()}-x"  # no process has so high an id
    for path in (stale, alive):
        path.mkdir(exist_ok=True)
    try:
        with confine_to_share(CpuSlice((own_cores()[0],), 0.5), "test-sweep"):
            assert not stale.exists()
            assert alive.exists()
    finally:
        alive.rmdir()
