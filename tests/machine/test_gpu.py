"""Local GPUs, from an NVML that the test plays."""

from __future__ import annotations

from ctypes import Structure, c_uint
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.machine.gpu import local_gpus

A100_PLACES = {19: [(start, 1) for start in range(7)], 9: [(0, 4), (4, 4)]}


class NvmlError(Exception):
    pass


class PlacementStruct(Structure):
    _fields_ = [("start", c_uint), ("size", c_uint)]


class FakeDeviceNvml:
    """As much of NVML as gpuprof asks, for one GPU."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_GPU_INSTANCE_PROFILE_COUNT = 3
    c_nvmlGpuInstancePlacement_t = PlacementStruct  # noqa: N815 - NVML's name

    def __init__(self, name: str | bytes, *, mig: bool = False, root: bool = True, **answers: Any) -> None:
        self.name, self.mig, self.root, self.answers, self.open = name, mig, root, answers, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.answers.get("no_driver"):
            raise NvmlError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, _: int) -> str | bytes:  # noqa: N802
        return self.name

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=self.answers.get("memory", 123 * 2**20))

    def nvmlDeviceGetPowerManagementLimit(self, _: int) -> int:  # noqa: N802
        if "power_mw" not in self.answers:
            raise NvmlError("not supported")
        return int(self.answers["power_mw"])

    def nvmlDeviceGetCudaComputeCapability(self, _: int) -> tuple[int, int]:  # noqa: N802
        return self.answers["capability"]  # type: ignore[no-any-return]

    def nvmlDeviceGetNumGpuCores(self, _: int) -> int:  # noqa: N802
        return int(self.answers["cores"])

    def nvmlDeviceGetMemoryBusWidth(self, _: int) -> int:  # noqa: N802
        return int(self.answers["bus_bits"])

    def nvmlDeviceGetMaxClockInfo(self, _: int, which: int) -> int:  # noqa: N802
        return int(self.answers["sm_mhz" if which == self.NVML_CLOCK_SM else "memory_mhz"])

    def nvmlDeviceGetGpuInstanceProfileInfo(self, _: int, profile: int) -> Any:  # noqa: N802
        rows = [
            {"id": 19, "name": b"MIG 1g.10gb", "multiprocessorCount": 14, "sliceCount": 1, "instanceCount": 7},
            {"id": 20, "name": b"MIG 1g.10gb+me", "multiprocessorCount": 14, "sliceCount": 1, "instanceCount": 1},
            {"id": 9, "name": b"MIG 3g.40gb", "multiprocessorCount": 42, "sliceCount": 3, "instanceCount": 2},
        ]
        if not self.mig:
            raise NvmlError("not supported")
        return SimpleNamespace(memorySizeMB=9856, **rows[profile])

    def nvmlDeviceGetGpuInstancePossiblePlacements(self, _: int, profile_id: int, places: Any, count: Any) -> int:  # noqa: N802
        if not self.root:
            raise NvmlError("insufficient permissions")
        listed = A100_PLACES[profile_id]
        count._obj.value = len(listed)
        for index, (start, size) in enumerate(listed if places is not None else ()):
            places[index].start, places[index].size = start, size
        return 0


def test_without_a_driver_there_are_no_gpus() -> None:
    assert local_gpus(FakeDeviceNvml("x", no_driver=True)) == ()


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", b"NVIDIA A100-SXM4-80GB"])
def test_a_known_board_is_the_catalogues_with_what_the_driver_reports(name: str | bytes) -> None:
    nvml = FakeDeviceNvml(name, memory=80 * 2**30 - 1, power_mw=300_000)
    (gpu,) = local_gpus(nvml)
    device_ = device("a100-80")
    assert (gpu.name, gpu.compute_units, gpu.flops_per_s) == (device_.name, device_.compute_units, device_.flops_per_s)
    assert (gpu.dram_bytes, gpu.max_power_w) == (80 * 2**30 - 1, 300.0)
    assert gpu.mig_profiles == device_.mig_profiles
    assert nvml.open == 0


def test_mig_profiles_come_from_the_driver_without_media_variants() -> None:
    (gpu,) = local_gpus(FakeDeviceNvml("NVIDIA A100-SXM4-80GB", mig=True))
    assert [profile.name for profile in gpu.mig_profiles] == ["1g.10gb", "3g.40gb"]
    single, three = gpu.mig_profiles
    assert (single.start_slots, single.memory_slices, single.sms, single.max_count) == ((0, 1, 2, 3, 4, 5, 6), 1, 14, 7)
    assert (three.start_slots, three.memory_slices, gpu.mig_slices) == ((0, 4), 4, 8)
    assert gpu.sources["mig"] == "NVML"


def test_mig_profiles_are_the_catalogues_where_the_driver_wants_root() -> None:
    (gpu,) = local_gpus(FakeDeviceNvml("NVIDIA A100-SXM4-80GB", mig=True, root=False))
    assert gpu.mig_profiles == device("a100-80").mig_profiles


def test_an_unknown_board_is_scaled_from_one_of_its_capability() -> None:
    facts: dict[str, Any] = {
        "capability": (8, 6),
        "cores": 70 * 128,
        "sm_mhz": 1695,
        "memory_mhz": 8001,
        "bus_bits": 384,
    }
    (gpu,) = local_gpus(FakeDeviceNvml("NVIDIA RTX A5500", memory=48 * 2**30, **facts))
    a10 = device("a10")
    assert (gpu.name, gpu.compute_units, gpu.sm) == ("rtx-a5500", 70, a10.sm)
    assert gpu.flops_per_s["float32"] == pytest.approx(a10.flops_per_s["float32"] * 70 / 72)
    assert gpu.dram_bytes_per_s == pytest.approx(768e9, rel=0.001)
    assert (gpu.price_per_hour, gpu.max_power_w) == (None, None)


def test_a_board_of_an_unknown_capability_is_left_out() -> None:
    facts: dict[str, Any] = {"capability": (99, 0), "cores": 1, "sm_mhz": 1, "memory_mhz": 1, "bus_bits": 1}
    assert local_gpus(FakeDeviceNvml("NVIDIA Next", **facts)) == ()
