"""The device catalogue agrees with itself: rates follow from SMs and clock, MIG profiles fit their GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpuprof.domain.catalogue import device, device_of_driver, devices
from gpuprof.domain.device import Device
from gpuprof.errors import InputError

_NAMES = """
k80 p4 p100 t4 v100 v100-32 v100-pcie-16 v100-pcie-32 a10 a30 a40 a100-40 a100-80 a100-pcie-40 a100-pcie-80
rtx-3090 rtx-4090 rtx-5090 l4 l40 l40s h100 h100-pcie h100-nvl gh200 h200 b200 gb200 rtx-pro-6000 a2 a10g
rtx-a5000 rtx-a6000 rtx-6000-ada l20 h20 b300 gb300
"""
NAMES = _NAMES.split()
WITH_MIG = ["a30", "a100-40", "a100-80", "a100-pcie-40", "a100-pcie-80", "h100", "h200", "b200"]
WITH_MIG += ["h100-pcie", "h100-nvl", "gh200", "gb200", "rtx-pro-6000", "h20", "b300", "gb300"]

#: Operations that one SM does in a cycle (a multiply-add is two): CUDA C++ Programming Guide, arithmetic throughput,
#: and for tensor cores the architecture whitepapers.
_RATES = """
SM    float64  float32 tfloat32  float16 bfloat16     int8   float8   float4
3.7       128      384        -        -        -        -        -        -
6.0        64      128        -      256        -        -        -        -
6.1         8      256        -        -        -     1024        -        -
7.0        64      128        -     1024        -        -        -        -
7.5         4      128        -     1024        -     2048        -        -
8.0       128      128     1024     2048     2048     4096        -        -
8.6         4      256      512     1024     1024     2048        -        -
8.9         4      256      512     1024     1024     2048     2048        -
9.0       256      256     2048     4096     4096     8192     8192        -
10.0      128      256     4096     8192     8192    16384    16384    32768
10.3        4      256     4096     8192     8192    16384    16384    49152
12.0        4      256      512     1024     1024     2048     2048     4096
"""
_TABLE = [line.split() for line in _RATES.strip().splitlines()]
PER_SM_AND_CYCLE = {
    row[0]: {name: int(rate) for name, rate in zip(_TABLE[0][1:], row[1:], strict=True) if rate != "-"}
    for row in _TABLE[1:]
}
#: Under tensor load these clock lower than their boost: 1830 and 1620 MHz are in the H100 whitepaper, the others follow
#: from the published rates.
TENSOR_CLOCK_MHZ = {"h100": 1830.0, "h200": 1830.0, "gh200": 1830.0, "h100-pcie": 1620.0, "h100-nvl": 1545.0}
TENSOR_CLOCK_MHZ |= {"b200": 1850.0, "gb200": 2007.0, "b300": 1856.0, "gb300": 2008.0}
TENSOR_TYPES = {"tfloat32", "float16", "bfloat16", "int8", "float8", "float4"}
#: Boards whose tensor cores do half of what an SM of their capability can: of the GeForce, and of the L40, the rate
#: with float32 accumulation is halved.
HALVED = dict.fromkeys(("rtx-3090", "rtx-4090", "rtx-5090", "l40", "l20", "a10g"), 0.5) | {"h20": 148 / 632.5}
#: Rates that a product was cut down to, whatever its SMs could do.
CUT = {("h20", "float64"), ("b300", "int8"), ("gb300", "int8")}
WHOLE = {("rtx-3090", "int8"), ("rtx-4090", "int8"), ("rtx-5090", "int8"), ("rtx-5090", "float4")}


@pytest.fixture(params=NAMES)
def gpu(request: pytest.FixtureRequest) -> Device:
    return device(str(request.param))


def test_every_promised_gpu_is_there() -> None:
    assert sorted(devices()) == sorted(NAMES)


def test_a_name_is_found_in_any_case() -> None:
    assert device("A100-80") is device("a100-80")


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown device 'a100' \(did you mean a100-40\b"):
        device("a100")


def test_rates_follow_from_sms_clock_and_what_an_sm_does_in_a_cycle(gpu: Device) -> None:
    assert gpu.compute_capability is not None
    per_cycle = PER_SM_AND_CYCLE[gpu.compute_capability]
    assert set(gpu.flops_per_s) == set(per_cycle)
    for dtype, rate in gpu.flops_per_s.items():
        tensor = dtype in TENSOR_TYPES and len(per_cycle) > 3
        clock = TENSOR_CLOCK_MHZ.get(gpu.name, gpu.clock_mhz) if tensor else gpu.clock_mhz
        if (gpu.name, dtype) in CUT:
            continue
        each = float(per_cycle[dtype])
        if tensor and (gpu.name, dtype) not in WHOLE:
            each *= HALVED.get(gpu.name, 1.0)
        assert rate == pytest.approx(gpu.compute_units * clock * 1e6 * each, rel=0.03), dtype


def test_limits_of_an_sm_are_consistent(gpu: Device) -> None:
    assert gpu.sm is not None
    assert gpu.sm.threads == 32 * gpu.sm.warps
    assert gpu.sm.max_shared_memory_per_block_bytes <= gpu.sm.shared_memory_bytes
    assert gpu.sm.max_registers_per_block <= gpu.sm.registers


def test_every_group_of_numbers_says_where_it_was_read(gpu: Device) -> None:
    groups = {"name", "compute", "memory", "limits", "power", "price"} | ({"mig"} if gpu.mig_profiles else set())
    assert set(gpu.sources) == groups
    assert all(gpu.sources.values())


def test_a_gpu_without_a_price_says_why(gpu: Device) -> None:
    assert (gpu.price_per_hour is None) == gpu.sources["price"].startswith("none")


def test_mig_is_where_it_should_be(gpu: Device) -> None:
    assert bool(gpu.mig_profiles) == (gpu.name in WITH_MIG) == bool(gpu.mig_slices)


@pytest.mark.parametrize("name", WITH_MIG)
def test_mig_profiles_lie_inside_their_gpu(name: str) -> None:
    gpu = device(name)
    for profile in gpu.mig_profiles:
        assert profile.compute_slices == int(profile.name.split("g.")[0])
        assert profile.sms <= gpu.compute_units
        assert profile.sms * profile.max_count <= gpu.compute_units
        assert profile.memory_bytes * profile.max_count <= gpu.dram_bytes
        assert len(profile.start_slots) >= profile.max_count
        assert all(start + profile.memory_slices <= gpu.mig_slices for start in profile.start_slots)
        assert list(profile.start_slots) == sorted(set(profile.start_slots))


@pytest.mark.parametrize("name", WITH_MIG)
def test_a_mig_profile_is_called_after_its_memory(name: str) -> None:
    for profile in device(name).mig_profiles:
        named = int(profile.name.split(".")[1].removesuffix("gb"))
        assert 0.85 * named <= profile.memory_bytes / 2**30 <= named, profile.name


@pytest.mark.parametrize("name", WITH_MIG)
def test_a_larger_mig_profile_has_no_less_of_anything(name: str) -> None:
    profiles = sorted(device(name).mig_profiles, key=lambda profile: (profile.compute_slices, profile.memory_slices))
    for smaller, larger in pairwise(profiles):
        assert smaller.sms <= larger.sms
        assert smaller.memory_bytes <= larger.memory_bytes
    assert profiles[-1].memory_slices == device(name).mig_slices


def test_a_board_is_found_by_its_drivers_name() -> None:
    board = device_of_driver("NVIDIA H200")
    assert board is device("h200")
    assert device_of_driver("NVIDIA H200 NVL") is None
