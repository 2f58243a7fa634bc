"""A GPU as NVML shows it, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

GIB = 2**30


class FakeNvmlError(Exception):
    """What the binding raises for whatever a GPU does not have."""


class FakeNvml:
    """One V100 that draws 100 W, then 20 W more at each sample; ``lacks`` names functions that it does not have."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    NVMLError = FakeNvmlError

    def __init__(self, *lacks: str, gpus: int = 1) -> None:
        self.lacks = lacks
        self.gpus = gpus
        self.asked = 0
        self.energy_mj: float | None = None

    def _check(self, function: str) -> None:
        if function in self.lacks:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        self._check("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:  # noqa: N802
        self._check("power")
        self.asked += 1
        return 80_000 + 20_000 * self.asked

    def nvmlDeviceGetTotalEnergyConsumption(self, _: int) -> float:  # noqa: N802
        if self.energy_mj is None:
            raise self.NVMLError("Not Supported")
        return self.energy_mj

    def nvmlDeviceGetClockInfo(self, *_: int) -> int:  # noqa: N802
        return 1380

    def nvmlDeviceGetTemperature(self, *_: int) -> int:  # noqa: N802
        return 40 + self.asked

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=GIB * min(self.asked, 3))
