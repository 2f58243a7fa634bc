from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.cgroup import quota_parent
from gpuprof.machine.cpu_share import confine_to_share, own_cores
from gpuprof.rules.cpu_slices import CpuSlice, plan_slices


def _quota_reason() -> str:
    try:
        quota_parent()
    except UnavailableError as error:
        return str(error)
    return ""


def test_whole_cores_are_nobody_elses() -> None:
    assert plan_slices([50, 50], [0, 1]) == (CpuSlice((0,)), CpuSlice((1,)))
    assert plan_slices([100], [3, 5]) == (CpuSlice((3, 5)),)


def test_fractions_share_the_core_that_is_left() -> None:
    big, small = plan_slices([75, 25], [0, 1])
    assert big == CpuSlice((0, 1), 1.5)
    assert small == CpuSlice((1,), 0.5)
    assert (big.threads, small.threads) == (2, 1)


def test_a_fraction_that_fits_nowhere_whole_is_spread() -> None:
    slices = plan_slices([30, 30, 40], [0, 1])
    assert sorted(len(part.cores) for part in slices) == [1, 1, 2]


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
