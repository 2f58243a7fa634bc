import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import Gpu, MigInstance
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine import gpu_share
from gpuprof.machine.gpu import LocalGpu, LocalMigInstance, find_gpu, list_local_gpus
from gpuprof.machine.gpu_share import (
    VISIBLE,
    MigLayout,
    apply_layout,
    bind_shares,
    describe_share_means,
    read_layout,
    restore_layout,
)
from gpuprof.machine.mps import CONTROL, MEMORY, PERCENTAGE, MpsDaemon, mps_daemon
from gpuprof.runtime.providers import MPS_PIPE
from tests.machine.played_nvml import mig_gpu

A100 = device("a100-80")


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    started: list[str | None] = []

    @contextmanager
    def fake(visible: str | None = None) -> Iterator[MpsDaemon]:
        started.append(visible)
        yield MpsDaemon("/pipe")

    monkeypatch.setattr(gpu_share, "mps_daemon", fake)
    return started


def test_instances_are_found_by_profile_and_slice() -> None:
    (whole,), (gpu,) = list_local_gpus(mig_gpu()), list_local_gpus(mig_gpu("3g.40gb", None, "1g.10gb"))
    assert gpu.instances == (LocalMigInstance("3g.40gb", 0, "MIG-0"), LocalMigInstance("1g.10gb", 8, "MIG-2"))
    assert whole.device == gpu.device == "a100-80"
    assert whole.find_uuid(None) == "GPU-0"
    assert gpu.find_uuid(MigInstance(profile="1g.10gb", start=8)) == "MIG-2"
    with pytest.raises(UnavailableError, match=r"nvidia-smi mig -i 0 -cgi 3g\.40gb:4 -C"):
        gpu.find_uuid(MigInstance(profile="3g.40gb", start=4))
    with pytest.raises(UnavailableError, match="wants it whole"):
        gpu.find_uuid(None)


def test_a_gpu_that_is_not_there_or_another_is_an_error() -> None:
    gpus = (LocalGpu(0, "h100", "u"),)
    assert find_gpu(Gpu(index=0, device="h100", partitions=()), gpus).uuid == "u"
    with pytest.raises(UnavailableError, match="which is h100 here"):
        find_gpu(Gpu(index=0, device="a100-80", partitions=()), gpus)
    with pytest.raises(UnavailableError, match="does not have"):
        find_gpu(Gpu(index=1, device="h100", partitions=()), gpus)


PIPE = {MPS_PIPE: "/pipe"}
HALF, THREE = Share(50.0, "3g.40gb"), Share(100.0, "3g.40gb")


@pytest.mark.parametrize(
    ("shares", "instances", "environments", "started"),
    [
        ([Share()], [], [{}], []),
        ([Share(30.0), Share(70.0)], [], [{**PIPE, PERCENTAGE: "30"}, {**PIPE, PERCENTAGE: "70"}], [None]),
        ([Share(), Share()], [], [PIPE, PIPE], [None]),
        ([THREE, THREE], ["3g.40gb", "3g.40gb"], [{VISIBLE: "MIG-0"}, {VISIBLE: "MIG-1"}], []),
        ([HALF, HALF], ["3g.40gb"], [{VISIBLE: "MIG-0", **PIPE, PERCENTAGE: "50"}] * 2, ["MIG-0"]),
    ],
    ids=["whole", "parts by one daemon", "all for several", "whole instances", "parts of an instance"],
)
def test_a_process_is_bound_to_its_share_by_its_environment(
    daemons: list[str | None],
    shares: list[Share],
    instances: list[str],
    environments: list[dict[str, str]],
    started: list[str | None],
) -> None:
    with bind_shares(A100, shares, mig_gpu(*instances)) as bound:
        assert list(bound) == environments
    assert daemons == started


def test_shares_of_more_than_a_gpu_are_refused(daemons: list[str | None]) -> None:
    with pytest.raises(InputError, match="110% together do not fit"), bind_shares(A100, [Share(60.0), Share(50.0)]):
        pass


def test_an_instance_that_does_not_exist_is_not_made(daemons: list[str | None]) -> None:
    with (
        pytest.raises(UnavailableError, match=r"no free MIG instance 3g\.40gb: there are 1g\.10gb"),
        bind_shares(A100, [Share(100.0, "3g.40gb")], mig_gpu("1g.10gb")),
    ):
        pass
    with pytest.raises(InputError, match="no MIG profile"), bind_shares(A100, [Share(100.0, "9g.99gb")]):
        pass


def test_what_fails_within_a_share_is_not_taken_for_mps(daemons: list[str | None]) -> None:
    with pytest.raises(UnavailableError, match="smaller batch"), bind_shares(A100, [Share(30.0)]):
        raise UnavailableError("the model does not fit", "try a smaller batch")


def test_the_means_that_hold_a_share_are_told_from_the_environment() -> None:
    assert describe_share_means([{}]) == "nothing: the whole device"
    assert describe_share_means([MpsDaemon("/pipe").environment(30.0)]) == "MPS"
    assert describe_share_means([{VISIBLE: "MIG-1", **MpsDaemon("/pipe").environment(30.0)}]) == "MIG and MPS"


PLAYED = """#!{python}
import json, sys
path = {state!r}
state = json.load(open(path))
words = sys.argv[1:]
state["log"].append(" ".join(words))
def end(said="", code=0):
    json.dump(state, open(path, "w"))
    print(said)
    sys.exit(code)
gpu = state["gpus"][int(words[words.index("-i") + 1])]
if "--query-gpu=mig.mode.current" in words:
    end(gpu["mode"])
if state["root"] is False:
    end("Unable to change: Insufficient Permissions", 4)
if "-mig" in words:
    gpu["mode"] = "Enabled" if words[-1] == "1" else "Disabled"
    end("Enabled MIG Mode")
if "-lgi" in words:
    rows = [f"|   {{words[words.index('-i') + 1]}}  MIG {{p}}      9        {{n}}          {{s}}:4     |" for n, (p, s) in enumerate(gpu["instances"])]
    end("\\n".join(rows) or "No GPU instances found: Not Found", 0 if rows else 6)
if "-dci" in words:
    end()
if "-dgi" in words:
    gpu["instances"] = []
    end()
if "-cgi" in words:
    profile, start = words[words.index("-cgi") + 1].split(":")
    if profile in state["refused"]:
        end("Unable to create a GPU instance: Insufficient Resources", 19)
    gpu["instances"].append([profile, int(start)])
    end("Successfully created GPU instance")
end("?", 2)
"""  # noqa: E501


class Smi:
    """The played tool and its GPUs."""

    def __init__(self, directory: Path, *gpus: tuple[str, list[list[Any]]]) -> None:
        self._state = directory / "state.json"
        self.tool = str(directory / "nvidia-smi")
        self.write(
            root=True, refused=[], log=[], gpus=[{"mode": mode, "instances": instances} for mode, instances in gpus]
        )
        Path(self.tool).write_text(PLAYED.format(python=sys.executable, state=str(self._state)))
        Path(self.tool).chmod(0o755)

    def write(self, **changed: Any) -> None:
        before = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._state.write_text(json.dumps({**before, **changed}))

    def gpu(self, number: int) -> Any:
        return json.loads(self._state.read_text())["gpus"][number]

    def changes(self) -> list[str]:
        log = json.loads(self._state.read_text())["log"]
        return [line for line in log if "query" not in line and "-lgi" not in line]


WANTED = MigLayout.of([("3g.40gb", 4), ("4g.40gb", 0)])


def test_a_gpu_is_cut_and_put_back(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", []), ("Enabled", [["1g.10gb", 6], ["2g.20gb", 0]]))
    before = apply_layout(1, WANTED, smi.tool)
    assert before == MigLayout(True, (("2g.20gb", 0), ("1g.10gb", 6)))
    assert smi.gpu(1)["instances"] == [["4g.40gb", 0], ["3g.40gb", 4]]
    assert smi.gpu(0)["instances"] == []
    assert restore_layout(1, before, smi.tool) is None
    assert read_layout(1, smi.tool) == before


def test_a_gpu_that_is_so_already_is_left_alone(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", [["3g.40gb", 4], ["4g.40gb", 0]]))
    assert apply_layout(0, WANTED, smi.tool) is None
    assert smi.changes() == []


def test_mig_is_switched_on_and_off_again(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Disabled", []))
    before = apply_layout(0, WANTED, smi.tool)
    assert before == MigLayout(False)
    assert restore_layout(0, before, smi.tool) is None
    assert smi.gpu(0) == {"mode": "Disabled", "instances": []}
    assert smi.changes()[-3:] == ["mig -i 0 -dci", "mig -i 0 -dgi", "-i 0 -mig 0"]


def test_without_permission_it_is_said_and_nothing_changes(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Disabled", []))
    smi.write(root=False)
    with pytest.raises(UnavailableError, match=r"Insufficient Permissions \(MIG instances are root's to make\)"):
        apply_layout(0, WANTED, smi.tool)
    assert smi.gpu(0) == {"mode": "Disabled", "instances": []}


def test_a_layout_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", [["7g.80gb", 0]]))
    smi.write(refused=["3g.40gb"])
    with pytest.raises(UnavailableError, match="Insufficient Resources"):
        apply_layout(0, WANTED, smi.tool)
    assert smi.gpu(0)["instances"] == [["7g.80gb", 0]]


def test_a_gpu_without_mig_and_a_machine_without_the_tool_are_named(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("[N/A]", []))
    with pytest.raises(UnavailableError, match="GPU 0 cannot be cut"):
        apply_layout(0, WANTED, smi.tool)
    with pytest.raises(UnavailableError, match="nowhere is not installed"):
        read_layout(0, "nowhere")


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


def test_own_shares_do_not_reach_the_daemon(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
