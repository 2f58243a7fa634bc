"""MPS with a control program that notes what it is told, and GPUs that NVML is made to show."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.deployment import Gpu, MigPlace, parse_map
from gpuprof.errors import UnavailableError
from gpuprof.serving import serving_plan
from gpuprof.serving.gpu_places import LocalGpu, find_gpu, local_places
from gpuprof.serving.mps import GpuShare, MpsDaemon, needs_mps
from tests.serving.running import map_of, replica

CONTROL = """#!/bin/sh
said=$( [ "$1" = "-d" ] || cat )
echo "$* $said visible=$CUDA_VISIBLE_DEVICES pipes=$CUDA_MPS_PIPE_DIRECTORY" >> "{notes}"
exit {code}
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(code: int = 0) -> Path:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(CONTROL.format(notes=tmp_path / "notes", code=code))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return tmp_path / "notes"

    return install


def test_each_daemon_has_a_directory_of_its_own_and_is_told_to_quit(control: Any) -> None:
    notes = control()
    daemon, other = MpsDaemon("GPU-1"), MpsDaemon("MIG-2")
    pipes, pipes_2 = daemon.start(), other.start()
    assert pipes != pipes_2 and pipes.is_dir()
    daemon.stop()
    other.stop()
    assert not pipes.exists() and not pipes_2.exists()
    assert notes.read_text().splitlines() == [
        f"-d  visible=GPU-1 pipes={pipes}",
        f" get_server_list visible= pipes={pipes}",
        f"-d  visible=MIG-2 pipes={pipes_2}",
        f" get_server_list visible= pipes={pipes_2}",
        f" quit visible= pipes={pipes}",
        f" quit visible= pipes={pipes_2}",
    ]


def test_a_daemon_that_does_not_start_is_an_error(control: Any) -> None:
    control(code=1)
    daemon = MpsDaemon("GPU-1")
    with pytest.raises(UnavailableError, match="MPS does not start for GPU-1"):
        daemon.start()
    daemon.stop()


def test_without_mps_a_share_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="not installed"):
        MpsDaemon("GPU-1").start()


def test_the_environment_binds_device_percentage_and_memory(tmp_path: Path) -> None:
    share = GpuShare("GPU-1", 37.5, (1 << 30) + 1)
    assert share.environment(tmp_path) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "37.5",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1025M",
    }
    assert share.environment(None) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}


def test_one_process_that_has_everything_needs_no_mps() -> None:
    assert not needs_mps([100.0])
    assert needs_mps([50.0]) and needs_mps([100.0, 100.0])


class PlayedNvml:
    """Two GPUs, the second cut into two instances."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"_{name.removeprefix('nvml')}")

    def _DeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def _DeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu{index}"

    def _DeviceGetName(self, handle: str) -> str:  # noqa: N802
        return {"mig0": "NVIDIA A100-SXM4-80GB MIG 3g.40gb"}.get(handle, "NVIDIA A100-SXM4-80GB")

    def _DeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return f"uuid-{handle}".encode()

    def _DeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        if handle == "gpu0":
            raise self.NVMLError
        return 7

    def _DeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:  # noqa: N802
        if number:
            raise self.NVMLError
        return "mig0"

    def _DeviceGetGpuInstanceId(self, handle: str) -> int:  # noqa: N802
        return 2

    def _DeviceGetGpuInstanceById(self, handle: str, number: int) -> int:  # noqa: N802
        return number

    def _GpuInstanceGetInfo(self, number: int) -> Any:  # noqa: N802
        return SimpleNamespace(placement=SimpleNamespace(start=4, size=4))


def test_instances_are_found_by_profile_and_slice() -> None:
    places = local_places(PlayedNvml())
    assert [place.device for place in places] == ["a100-80", "a100-80"]
    assert places[0].place(None) == "uuid-gpu0"
    assert places[1].place(MigPlace(profile="3g.40gb", start=4)) == "uuid-mig0"
    with pytest.raises(UnavailableError, match=r"nvidia-smi mig -i 1 -cgi 3g\.40gb:0 -C"):
        places[1].place(MigPlace(profile="3g.40gb", start=0))
    with pytest.raises(UnavailableError, match="wants it whole"):
        places[1].place(None)


def test_a_gpu_that_is_not_there_or_another_is_an_error() -> None:
    places = (LocalGpu(0, "h100", "u"),)
    assert find_gpu(Gpu(index=0, device="h100", partitions=()), places).uuid == "u"
    with pytest.raises(UnavailableError, match="which is h100 here"):
        find_gpu(Gpu(index=0, device="a100-80", partitions=()), places)
    with pytest.raises(UnavailableError, match="does not have"):
        find_gpu(Gpu(index=1, device="h100", partitions=()), places)


def test_the_replicas_of_a_gpu_are_ordered_with_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_plan, "local_places", lambda: (LocalGpu(0, "h100", "GPU-1"),))
    document = map_of({"m": "null:4"}, [replica("m", sm_share_pct=60.0, processes=2, memory_limit_bytes=1 << 30)])
    document["nodes"][0]["gpus"][0]["device"] = "h100"
    (planned,) = serving_plan.plan_workers(parse_map(document, "test"), Path(), "g")
    assert [order.gpu for order in planned.orders] == [GpuShare("GPU-1", 30.0, 1 << 30)] * 2
    assert all(order.with_mps and order.provider == "CUDAExecutionProvider" for order in planned.orders)
