"""A GPU as NVML shows it, on a machine without one: the part that gpuprof asks."""
# ruff: noqa: D103, N802 - NVML's names

from __future__ import annotations

import time
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
_GIB = 2**30


class NVMLError(Exception):
    """What this GPU does not say."""


def nvmlInit() -> None: ...


def nvmlShutdown() -> None: ...


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return 0


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA Rehearsal GPU"


def nvmlDeviceGetUUID(handle: int) -> str:
    return "GPU-00000000-0000-0000-0000-000000000000"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return 9, 0


def nvmlDeviceGetNumGpuCores(handle: int) -> int:
    return 16896


def nvmlDeviceGetMemoryBusWidth(handle: int) -> int:
    return 6144


def nvmlDeviceGetMaxClockInfo(handle: int, clock: int) -> int:
    return 1980 if clock == NVML_CLOCK_SM else 3201


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    return nvmlDeviceGetMaxClockInfo(handle, clock)


def nvmlDeviceGetPowerManagementLimit(handle: int) -> int:
    return 700_000


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 120_000


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> float:
    return 300_000.0 * time.monotonic()  # 300 W, where the power above is what a lagging mean would say


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return 40


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=140 * _GIB, used=2 * _GIB, free=138 * _GIB)


def nvmlDeviceGetMaxMigDeviceCount(handle: int) -> int:
    return 0


def nvmlDeviceGetMigMode(handle: int) -> tuple[int, int]:
    raise NVMLError("Not Supported")


def nvmlSystemGetDriverVersion() -> str:
    return "rehearsed"
