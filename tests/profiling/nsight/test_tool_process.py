from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from gpuprof.errors import UnavailableError
from gpuprof.profiling.nsight.ncu_report import known_failure
from gpuprof.profiling.nsight.tool_process import ask_tool, run_tool, tool_version
from tests.profiling.fake_tools import write_program
from tests.reruns import measures_in_real_time
from tests.serving.running import eventually, has_ended

pytestmark = measures_in_real_time


def test_what_it_prints_is_kept_in_order(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "echo one; echo two >&2; echo three")
    printed = run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)
    assert printed.split() == ["one", "two", "three"]


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
    monkeypatch.setattr("gpuprof.profiling.nsight.tool_process._GRACE_S", 0.5)
    pid_file = tmp_path / "pid"
    tool = write_program(
        tmp_path / "tool", f"{stubborn}echo working; sleep 600 & echo $! > {pid_file}; wait; sleep 600"
    )
    with pytest.raises(UnavailableError, match=r"did not end within 1 s and was ended: working \(log: "):
        run_tool([str(tool)], log=tmp_path / "log", time_limit_s=1)
    assert _wait_for_end(int(pid_file.read_text()))


def test_the_log_of_one_that_failed_outlives_the_directory_of_the_run(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "seq 3000; echo 'error: at the end'; exit 3")
    with tempfile.TemporaryDirectory() as directory, pytest.raises(UnavailableError) as raised:
        run_tool([str(tool)], log=Path(directory) / "log", time_limit_s=30)
    log = Path(raised.value.fix.removeprefix("log: "))
    try:
        assert log.read_text().startswith("1\n2\n") and log.read_text().endswith("error: at the end\n")
    finally:
        log.unlink()


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("NVIDIA Nsight Systems version 2024.6.1.90-246160830v0", "2024.6.1.90"),
        ("NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2025\nVersion 2025.3.1.0 (build 1)",
         "2025.3.1.0"),
        ("Usage: nsys", None),
    ],
)  # fmt: skip
def test_the_version_is_read_from_what_each_tool_prints(tmp_path: Path, printed: str, version: str | None) -> None:
    assert tool_version(write_program(tmp_path / "tool", f"echo '{printed}'")) == version


def test_a_tool_that_fails_hangs_or_is_not_there_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.profiling.nsight.tool_process._GRACE_S", 0.5)
    pid_file = tmp_path / "pid"
    assert ask_tool([str(write_program(tmp_path / "a", "echo 1; exit 1"))], 30) is None
    assert ask_tool([str(tmp_path / "nowhere")], 30) is None
    hangs = write_program(tmp_path / "b", f"sleep 600 & echo $! > {pid_file}; wait")
    assert ask_tool([str(hangs)], 1) is None
    assert _wait_for_end(int(pid_file.read_text()))


def test_children_that_a_tool_leaves_behind_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tool = write_program(tmp_path / "tool", f"sleep 600 & echo $! > {pid_file}")
    run_tool([str(tool)], log=tmp_path / "log", time_limit_s=30)
    assert _wait_for_end(int(pid_file.read_text()))


def _wait_for_end(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    return eventually(lambda: has_ended(process))
