"""Local GPUs, from an NVML that the test plays."""

import ctypes
from ctypes import Structure, c_uint
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.machine.gpu import ask_nvml, local_gpus, visible_sms
from tests.machine.played_nvml import FakeNvmlError, PlayedNvml

A100_PLACES = {19: [(start, 1) for start in range(7)], 9: [(0, 4), (4, 4)]}


class PlacementStruct(Structure):
    _fields_ = [("start", c_uint), ("size", c_uint)]


PROFILES = [
    {"id": 19, "name": b"MIG 1g.10gb", "multiprocessorCount": 14, "sliceCount": 1, "instanceCount": 7},
    {"id": 20, "name": b"MIG 1g.10gb+me", "multiprocessorCount": 14, "sliceCount": 1, "instanceCount": 1},
    {"id": 9, "name": b"MIG 3g.40gb", "multiprocessorCount": 42, "sliceCount": 3, "instanceCount": 2},
]


def one_gpu(name: str | bytes, *, mig: bool = False, memory: int = 123 * 2**20, **answers: Any) -> PlayedNvml:
    """Return one GPU, with MIG profiles if ``mig``; its placements need ``root``."""

    def list_placements(_: int, profile_id: int, places: Any, count: Any) -> int:
        listed = A100_PLACES[profile_id]
        count._obj.value = len(listed)
        for index, (start, size) in enumerate(listed if places is not None else ()):
            places[index].start, places[index].size = start, size
        return 0

    answers = {
        "NVML_CLOCK_SM": "sm",
        "NVML_CLOCK_MEM": "memory",
        "NVML_GPU_INSTANCE_PROFILE_COUNT": len(PROFILES) if mig else 0,
        "c_nvmlGpuInstancePlacement_t": PlacementStruct,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=memory),
        "nvmlDeviceGetGpuInstanceProfileInfo": lambda _, p: SimpleNamespace(memorySizeMB=9856, **PROFILES[p]),
        "nvmlDeviceGetGpuInstancePossiblePlacements": list_placements,
        **answers,
    }
    return PlayedNvml(**answers)


def board(capability: tuple[int, int], cores: int, clocks_mhz: dict[str, int], bus_bits: int) -> dict[str, Any]:
    """Return NVML's answers on a board that the catalogue lacks."""
    return {
        "nvmlDeviceGetCudaComputeCapability": lambda _: capability,
        "nvmlDeviceGetNumGpuCores": cores,
        "nvmlDeviceGetMemoryBusWidth": bus_bits,
        "nvmlDeviceGetMaxClockInfo": lambda _, clock: clocks_mhz[clock],
    }


def test_without_a_driver_there_are_no_gpus() -> None:
    assert local_gpus(one_gpu("x", nvmlInit=FakeNvmlError("driver not loaded"))) == ()


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", b"NVIDIA A100-SXM4-80GB"])
def test_a_known_board_is_the_catalogues_with_what_the_driver_reports(name: str | bytes) -> None:
    nvml = one_gpu(name, memory=80 * 2**30 - 1, nvmlDeviceGetPowerManagementLimit=300_000)
    (gpu,) = local_gpus(nvml)
    device_ = device("a100-80")
    assert (gpu.name, gpu.compute_units, gpu.flops_per_s) == (device_.name, device_.compute_units, device_.flops_per_s)
    assert (gpu.dram_bytes, gpu.max_power_w) == (80 * 2**30 - 1, 300.0)
    assert gpu.mig_profiles == device_.mig_profiles


def test_mig_profiles_come_from_the_driver_without_media_variants() -> None:
    (gpu,) = local_gpus(one_gpu("NVIDIA A100-SXM4-80GB", mig=True))
    assert [profile.name for profile in gpu.mig_profiles] == ["1g.10gb", "3g.40gb"]
    single, three = gpu.mig_profiles
    assert (single.start_slots, single.memory_slices, single.sms, single.max_count) == ((0, 1, 2, 3, 4, 5, 6), 1, 14, 7)
    assert (three.start_slots, three.memory_slices, gpu.mig_slices) == ((0, 4), 4, 8)
    assert gpu.sources["mig"] == "NVML"


def test_mig_profiles_are_the_catalogues_where_the_driver_wants_root() -> None:
    (gpu,) = local_gpus(
        one_gpu("NVIDIA A100-SXM4-80GB", mig=True, nvmlDeviceGetGpuInstancePossiblePlacements=FakeNvmlError())
    )
    assert gpu.mig_profiles == device("a100-80").mig_profiles


def test_an_unknown_board_is_scaled_from_one_of_its_capability() -> None:
    facts = board((8, 6), 70 * 128, {"sm": 1695, "memory": 8001}, 384)
    (gpu,) = local_gpus(one_gpu("NVIDIA RTX A5500", memory=48 * 2**30, **facts))
    a10 = device("a10")
    assert (gpu.name, gpu.compute_units, gpu.sm) == ("rtx-a5500", 70, a10.sm)
    assert gpu.flops_per_s["float32"] == pytest.approx(a10.flops_per_s["float32"] * 70 / 72)
    assert gpu.dram_bytes_per_s == pytest.approx(768e9, rel=0.001)
    assert (gpu.price_per_hour, gpu.max_power_w) == (None, None)


def test_a_board_of_an_unknown_capability_is_left_out() -> None:
    facts = board((99, 0), 1, {"sm": 1, "memory": 1}, 1)
    assert local_gpus(one_gpu("NVIDIA Next", **facts)) == ()


class _RefusalError(Exception):
    pass


def _refuse(handle: object) -> None:
    raise _RefusalError


def test_what_a_gpu_or_an_older_binding_does_not_have_is_none() -> None:
    nvml = SimpleNamespace(
        NVMLError=_RefusalError, nvmlDeviceGetName=lambda handle: "gpu", nvmlDeviceGetMigMode=_refuse
    )
    assert ask_nvml(nvml, "nvmlDeviceGetName", 0) == "gpu"
    assert ask_nvml(nvml, "nvmlDeviceGetMigMode", 0) is None
    assert ask_nvml(nvml, "nvmlDeviceGetNumGpuCores", 0) is None


def _driver(sms: int, fails: str = "") -> Any:
    def attribute(count: Any, number: int, device: Any) -> int:
        assert number == 16
        count._obj.value = sms
        return int(fails == "attribute")

    return SimpleNamespace(
        cuInit=lambda flags: int(fails == "init"), cuDeviceGet=lambda device, index: 0, cuDeviceGetAttribute=attribute
    )


def test_a_client_is_told_its_part_of_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _driver(66))
    assert visible_sms() == 66
    for fails in ("init", "attribute"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, fails=fails: _driver(66, fails))
        assert visible_sms() is None
