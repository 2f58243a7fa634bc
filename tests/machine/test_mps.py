from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.mps import CONTROL, MEMORY, PERCENTAGE, MpsDaemon, mps_daemon
from gpuprof.runtime.providers import MPS_PIPE

# A daemon is a file in its pipe directory; every call and its environment are logged.
FAKE = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY|$CUDA_VISIBLE_DEVICES|$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE|$*" >> {log}
if [ "$1" = -d ]; then {start}; exit 0; fi
read command
[ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
if [ "$command" = quit ]; then rm "$CUDA_MPS_PIPE_DIRECTORY/control"; echo quit >> {log}; fi
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(MPS_PIPE, str(tmp_path / "users"))
    return _write(tmp_path, 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"')


def _write(directory: Path, start: str) -> Path:
    path = directory / CONTROL
    path.write_text(FAKE.format(log=directory / "log", start=start))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_daemon_of_our_own_lives_in_its_own_directory_and_is_stopped(control: Path, tmp_path: Path) -> None:
    with mps_daemon("GPU-1") as daemon:
        pipe = Path(daemon.pipe_directory)
        assert (pipe / "control").exists()
        assert pipe != tmp_path / "users"
        assert f"{pipe}|GPU-1||-d" in (tmp_path / "log").read_text()
    assert not pipe.exists()
    assert (tmp_path / "log").read_text().splitlines()[-1] == "quit"


def test_the_users_daemon_is_used_and_left_running(control: Path, tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "control").touch()
    with mps_daemon() as daemon:
        assert daemon == MpsDaemon(str(tmp_path / "users"))
    assert (tmp_path / "users" / "control").exists()
    assert "-d" not in (tmp_path / "log").read_text()


def test_a_daemon_that_keeps_what_it_prints_on_is_not_waited_for(control: Path, tmp_path: Path) -> None:
    _write(tmp_path, f'sleep 600 & echo $! > {tmp_path}/sleeper; touch "$CUDA_MPS_PIPE_DIRECTORY/control"')
    try:
        with mps_daemon() as daemon:
            assert (Path(daemon.pipe_directory) / "control").exists()
    finally:
        os.kill(int((tmp_path / "sleeper").read_text()), signal.SIGKILL)


def test_a_daemon_that_answers_a_moment_later_is_waited_for(control: Path, tmp_path: Path) -> None:
    _write(tmp_path, 'pipe=$CUDA_MPS_PIPE_DIRECTORY; { sleep 0.4; touch "$pipe/control"; } > /dev/null 2>&1 & true')
    with mps_daemon() as daemon:
        assert (Path(daemon.pipe_directory) / "control").exists()


def test_without_the_program_it_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="comes with NVIDIA's driver"), mps_daemon():
        pass


def test_a_share_of_ours_does_not_reach_the_daemon(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PERCENTAGE, "10")
    with mps_daemon():
        assert all(line.split("|")[2] == "" for line in (tmp_path / "log").read_text().splitlines())


def test_a_clients_environment_holds_its_share_and_its_limit() -> None:
    environment = MpsDaemon("/p", "/l").environment(12.5, 3 * 2**30)
    assert environment == {MPS_PIPE: "/p", "CUDA_MPS_LOG_DIRECTORY": "/l", PERCENTAGE: "12.5", MEMORY: "0=3072M"}
    assert MpsDaemon("/p").environment(100.0) == {MPS_PIPE: "/p", PERCENTAGE: "100"}
    for wrong in (0.0, 100.5):
        with pytest.raises(InputError, match="above 0 and at most 100"):
            MpsDaemon("/p").environment(wrong)
    with pytest.raises(InputError, match="at least 1 MiB"):
        MpsDaemon("/p").environment(50.0, 10)


def test_a_daemon_that_does_not_start_says_what_both_of_its_logs_end_with(control: Path, tmp_path: Path) -> None:
    logs = 'cd "$CUDA_MPS_LOG_DIRECTORY"; echo "no memory for it" > server.log; echo busy > control.log'
    _write(tmp_path, f"{logs}; exit 1")
    with pytest.raises(UnavailableError, match=r"control\.log: busy; server\.log: no memory for it"), mps_daemon():
        pass


def test_a_client_that_fails_shows_what_both_logs_end_with(control: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught, mps_daemon() as daemon:
        assert daemon.log_directory is not None
        (Path(daemon.log_directory) / "server.log").write_text("x" * 1000 + "\nFailed to start : invalid argument\n")
        raise UnavailableError("this PyTorch sees no GPU: error 805", "look at the driver")
    assert caught.value.message == "this PyTorch sees no GPU: error 805"
    assert caught.value.fix.startswith("look at the driver; MPS says: server.log: ")
    assert caught.value.fix.endswith("xx Failed to start : invalid argument") and len(caught.value.fix) < 400
