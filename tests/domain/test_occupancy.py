"""Theoretical occupancy against NVIDIA's own calculator, compiled from a CUDA toolkit where one is installed."""

import importlib.util
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.catalogue import device, devices
from gpuprof.domain.occupancy import Occupancies, occupancies
from gpuprof.errors import InputError

HEADER = "cuda_occupancy.h"
LAUNCHES = 1500
UNKNOWN_DEVICE = 2

# Reads a launch a line and prints what the header says of it: blocks, the four limits, the limiting factors.
ORACLE = """
#include <climits>
#include <cstdio>
#include "cuda_occupancy.h"

int main() {
    int major, minor, threads, registers, sms, shared_kib, carveout, block, used, statics, dynamics;
    int default_bytes, most_bytes;
    while (std::scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d", &major, &minor, &threads, &registers, &sms, &shared_kib,
                      &default_bytes, &most_bytes, &carveout, &block, &used, &statics, &dynamics) == 13) {
        cudaOccDeviceProp gpu;
        gpu.computeMajor = major;
        gpu.computeMinor = minor;
        gpu.maxThreadsPerBlock = 1024;
        gpu.maxThreadsPerMultiprocessor = threads;
        gpu.regsPerBlock = 65536;
        gpu.regsPerMultiprocessor = registers;
        gpu.warpSize = 32;
        gpu.sharedMemPerBlock = default_bytes;
        gpu.sharedMemPerMultiprocessor = shared_kib * 1024;
        gpu.numSms = sms;
        gpu.sharedMemPerBlockOptin = most_bytes;
        gpu.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.numRegs = used;
        kernel.sharedSizeBytes = statics;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = dynamics;
        cudaOccDeviceState state;
        state.carveoutConfig = carveout;
        cudaOccResult result;
        int status = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, block, dynamics);
        std::printf("%d %d %d %d %d %d %u\\n", status, result.activeBlocksPerMultiprocessor, result.blockLimitWarps,
                    result.blockLimitRegs, result.blockLimitSharedMem, result.blockLimitBlocks, result.limitingFactors);
    }
}
"""


def _header_directories() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)
    yield Path("/usr/include")
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(place).glob("*/include"))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that asks NVIDIA's header."""
    include = next((place for place in _header_directories() if (place / HEADER).is_file()), None)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if include is None:
        pytest.skip(f"no CUDA toolkit with {HEADER} is installed")
    if compiler is None:
        pytest.skip(f"no C++ compiler to build {HEADER} with")
    place = tmp_path_factory.mktemp("occupancy")
    (place / "oracle.cpp").write_text(ORACLE)
    subprocess.run([compiler, "-O1", "-I", include, "-o", place / "oracle", place / "oracle.cpp"], check=True)
    return place / "oracle"


@pytest.mark.parametrize("name", list(devices()))
def test_nvidias_calculator_agrees_on_random_launches(oracle: Path, name: str) -> None:
    gpu = device(name)
    assert gpu.sm is not None
    assert gpu.compute_capability is not None
    random = np.random.default_rng(len(name))
    threads = np.where(random.random(LAUNCHES) < 0.5, random.integers(1, 33, LAUNCHES) * 32, 0)
    threads = np.where(threads == 0, random.integers(1, 1100, LAUNCHES), threads)
    used = random.integers(0, 258, LAUNCHES)
    statics = np.where(random.random(LAUNCHES) < 0.4, 0, random.integers(0, 48 * 1024, LAUNCHES))
    dynamics = np.where(random.random(LAUNCHES) < 0.4, 0, random.integers(0, gpu.sm.shared_memory_bytes, LAUNCHES))
    major, minor = gpu.compute_capability.split(".")
    fixed = (
        f"{major} {minor} {gpu.sm.threads} {gpu.sm.registers} {gpu.compute_units} {gpu.sm.shared_memory_bytes >> 10}"
    )
    fixed += f" 49152 {gpu.sm.max_shared_memory_per_block_bytes} -1"
    lines = [f"{fixed} {' '.join(map(str, row))}" for row in zip(threads, used, statics, dynamics, strict=True)]
    completed = subprocess.run([oracle], input="\n".join(lines), capture_output=True, text=True, check=True)
    calculated = np.array([line.split() for line in completed.stdout.splitlines()], dtype=np.int64)
    if (calculated[:, 0] == UNKNOWN_DEVICE).all():
        pytest.skip(f"the installed {HEADER} is older than compute capability {gpu.compute_capability}")
    assert (calculated[:, 0] == 0).all()
    ours = occupancies(
        gpu,
        blocks=1,
        threads_per_block=threads,
        registers_per_thread=used,
        static_shared_bytes=statics,
        dynamic_shared_bytes=dynamics,
    )
    np.testing.assert_array_equal(ours.blocks_per_sm, calculated[:, 1])
    np.testing.assert_array_equal(ours.limits, calculated[:, 2:6].T)
    limiting = ((ours.limits == ours.blocks_per_sm) * np.array([[1], [2], [4], [8]])).sum(axis=0)
    np.testing.assert_array_equal(limiting, calculated[:, 6] & 0b1111)


def measure(
    name: str, blocks: int, threads: int, registers: int, static_bytes: int = 0, dynamic_bytes: int = 0
) -> Occupancies:
    return occupancies(
        device(name),
        blocks=blocks,
        threads_per_block=threads,
        registers_per_thread=registers,
        static_shared_bytes=static_bytes,
        dynamic_shared_bytes=dynamic_bytes,
    )


def test_sm_utilization_is_the_sms_that_hold_the_grid_at_once() -> None:
    whole, part = measure("v100", 1280, 256, 32), measure("v100", 200, 256, 32)
    assert (whole.blocks_per_sm[0], whole.occupancy_pct[0], whole.sm_utilization_pct[0]) == (8, 100.0, 100.0)
    assert part.sm_utilization_pct[0] == 31.25
    assert part.average_occupancy_pct[0] == pytest.approx(100.0 * 200 / 1280 * 2)


def test_the_largest_shared_memory_of_a_block_fits_and_one_unit_more_does_not() -> None:
    most = 227 * 1024
    assert measure("h100", 1, 32, 32, 0, most).blocks_per_sm[0] == 1
    occupancy = measure("h100", 1, 32, 32, 0, most + 128)
    assert (occupancy.blocks_per_sm[0], occupancy.occupancy_pct[0]) == (0, 0.0)
    assert math.isnan(occupancy.sm_utilization_pct[0]) and math.isnan(occupancy.average_occupancy_pct[0])


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ((0, 32, 32), "blocks must be at least 1 but got 0"),
        ((1, 0, 32), "threads per block must be at least 1 but got 0"),
        ((1, 32, -1), "registers per thread must be at least 0 but got -1"),
        ((1, 32, 32, 0, -5), "dynamic shared bytes must be at least 0 but got -5"),
    ],
)
def test_numbers_that_no_launch_has_are_refused(launch: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure("v100", *launch)


def test_a_cpu_and_an_unknown_capability_are_refused() -> None:
    given = {"blocks": 1, "threads_per_block": 32, "registers_per_thread": 32}
    with pytest.raises(InputError, match="has no SMs"):
        occupancies(replace(device("v100"), sm=None, kind="cpu"), **given)
    with pytest.raises(InputError, match=r"compute capability 99.0 are not known"):
        occupancies(replace(device("v100"), compute_capability="99.0"), **given)
