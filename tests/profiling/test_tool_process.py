from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from gpuprof.errors import UnavailableError
from gpuprof.profiling.ncu_report import known_failure
from gpuprof.profiling.tool_process import run_tool
from tests.profiling.fake_tools import write_program


def test_what_it_prints_is_kept_in_order(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "echo one; echo two >&2; echo three")
    finished = run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)
    assert finished.printed.split() == ["one", "two", "three"]


def test_a_tool_that_dies_shows_its_last_words_and_where_the_rest_is(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "echo 'Error: no such device' >&2; echo bye; exit 7")
    with pytest.raises(UnavailableError, match=r"tool failed \(exit code 7\): Error: no such device \(log: .*log\)"):
        run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)


def test_a_tool_that_is_killed_names_the_signal(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "kill -SEGV $$")
    with pytest.raises(UnavailableError, match="signal SIGSEGV"):
        run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)


def test_a_known_complaint_is_said_with_its_cure(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1")
    with pytest.raises(UnavailableError, match="RestrictProfilingToAdminUsers"):
        run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30, explain=known_failure)


def test_a_tool_that_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot start nowhere: No such file"):
        run_tool([str(tmp_path / "nowhere")], log=tmp_path / "log", time_limit_s=30)


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "], ids=["", "ignores SIGTERM"])
def test_a_tool_that_hangs_is_ended_with_all_its_children(
    tmp_path: Path, stubborn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprof.profiling.tool_process._GRACE_S", 0.5)
    pid_file = tmp_path / "pid"
    tool = write_program(
        tmp_path / "tool", f"{stubborn}echo working; sleep 600 & echo $! > {pid_file}; wait; sleep 600"
    )
    with pytest.raises(UnavailableError, match=r"did not end within 1 s.*working.*--time-limit"):
        run_tool([str(tool)], log=tmp_path / "log", time_limit_s=1)
    assert _ended(int(pid_file.read_text()))


def test_children_that_a_tool_leaves_behind_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tool = write_program(tmp_path / "tool", f"sleep 600 & echo $! > {pid_file}")
    run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)
    assert _ended(int(pid_file.read_text()))


def _ended(pid: int) -> bool:
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
