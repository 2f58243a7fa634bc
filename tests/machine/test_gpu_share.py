from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import Gpu, MigInstance
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine import gpu_share
from gpuprof.machine.gpu import LocalGpu, LocalMigInstance, find_gpu, list_local_gpus
from gpuprof.machine.gpu_share import VISIBLE, bind_shares, describe_share_means
from gpuprof.machine.mps import MpsDaemon
from tests.profiling.fake_nvml import FakeNvmlError

A100 = device("a100-80")


class FakeMigNvml:
    """A GPU with slots for MIG devices, some empty; without slots, a GPU that has no MIG."""

    NVMLError = FakeNvmlError

    def __init__(self, *instances: str | None) -> None:
        self.instances = instances

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"_{name.removeprefix('nvml')}")

    def _Init(self) -> None:  # noqa: N802 - NVML's names
        pass

    def _DeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def _DeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"GPU-{index}"

    def _DeviceGetName(self, handle: str | int) -> str:  # noqa: N802
        mig = f" MIG {self.instances[handle]}" if isinstance(handle, int) else ""
        return f"NVIDIA A100-SXM4-80GB{mig}"

    def _DeviceGetUUID(self, handle: str | int) -> bytes:  # noqa: N802
        return (f"MIG-{handle}" if isinstance(handle, int) else handle).encode()

    def _DeviceGetMaxMigDeviceCount(self, _: str) -> int:  # noqa: N802
        if not self.instances:
            raise self.NVMLError
        return len(self.instances)

    def _DeviceGetMigDeviceHandleByIndex(self, _: str, index: int) -> int:  # noqa: N802
        if self.instances[index] is None:
            raise self.NVMLError
        return index

    def _DeviceGetGpuInstanceId(self, index: int) -> int:  # noqa: N802
        return index

    def _DeviceGetGpuInstanceById(self, _: str, number: int) -> int:  # noqa: N802
        return number

    def _GpuInstanceGetInfo(self, number: int) -> Any:  # noqa: N802
        return SimpleNamespace(placement=SimpleNamespace(start=4 * number))


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
    (whole,), (gpu,) = list_local_gpus(FakeMigNvml()), list_local_gpus(FakeMigNvml("3g.40gb", None, "1g.10gb"))
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


def test_the_whole_gpu_needs_nothing(daemons: list[str | None]) -> None:
    with bind_shares(A100, [Share()]) as environments:
        assert environments == ({},)
    assert daemons == []


def test_parts_of_a_gpu_are_bound_by_one_daemon(daemons: list[str | None]) -> None:
    with bind_shares(A100, [Share(30.0), Share(70.0)]) as environments:
        assert [each["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for each in environments] == ["30", "70"]
    assert daemons == [None]
    with pytest.raises(InputError, match="110% together do not fit"), bind_shares(A100, [Share(60.0), Share(50.0)]):
        pass


def test_several_that_have_all_of_a_gpu_are_held_to_no_percentage(daemons: list[str | None]) -> None:
    with bind_shares(A100, [Share(), Share()]) as environments:
        assert len(environments) == 2
        assert all("CUDA_MPS_PIPE_DIRECTORY" in each for each in environments)
        assert not any("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in each for each in environments)
    assert daemons == [None]


def test_whole_instances_are_bound_by_uuid_each_to_its_own(daemons: list[str | None]) -> None:
    nvml = FakeMigNvml("3g.40gb", "3g.40gb")
    with bind_shares(A100, [Share(100.0, "3g.40gb")] * 2, nvml) as environments:
        assert environments == ({"CUDA_VISIBLE_DEVICES": "MIG-0"}, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert daemons == []


def test_parts_of_one_instance_share_it_under_a_daemon_of_its_own(daemons: list[str | None]) -> None:
    with bind_shares(A100, [Share(50.0, "3g.40gb")] * 2, FakeMigNvml("3g.40gb")) as environments:
        assert {each["CUDA_VISIBLE_DEVICES"] for each in environments} == {"MIG-0"}
    assert daemons == ["MIG-0"]


def test_an_instance_that_does_not_exist_is_not_made(daemons: list[str | None]) -> None:
    with (
        pytest.raises(UnavailableError, match=r"no free MIG instance 3g\.40gb: there are 1g\.10gb"),
        bind_shares(A100, [Share(100.0, "3g.40gb")], FakeMigNvml("1g.10gb")),
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
