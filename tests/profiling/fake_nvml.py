"""A GPU as NVML shows it, on a machine without one."""

from types import SimpleNamespace

from tests.machine.played_nvml import FakeNvmlError, PlayedNvml

GIB = 2**30


class FakeNvml(PlayedNvml):
    """One V100 that draws 100 W, then 20 W more at each sample; ``lacks`` names functions that it does not have."""

    def __init__(self, *lacks: str, gpus: int = 1) -> None:
        self.asked = 0
        self.energy_mj: float | None = None
        super().__init__(
            NVML_CLOCK_SM=1,
            NVML_TEMPERATURE_GPU=0,
            nvmlDeviceGetCount=gpus,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetPowerUsage=self._draw_power,
            nvmlDeviceGetTotalEnergyConsumption=self._count_energy,
            nvmlDeviceGetClockInfo=1380,
            nvmlDeviceGetTemperature=lambda *_: 40 + self.asked,
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=GIB * min(self.asked, 3)),
        )
        self._answers |= dict.fromkeys(lacks, FakeNvmlError("Not Supported"))

    def _draw_power(self, _: int) -> int:
        self.asked += 1
        return 80_000 + 20_000 * self.asked

    def _count_energy(self, _: int) -> float:
        if self.energy_mj is None:
            raise FakeNvmlError("Not Supported")
        return self.energy_mj
