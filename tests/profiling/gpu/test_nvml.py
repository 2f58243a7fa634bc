from __future__ import annotations

import time

import pytest

from gpuprof.profiling.gpu.nvml import NvmlSampler, idle_figures, nvml_missing, visible_gpu
from tests.profiling.fake_nvml import GIB, FakeNvml


def _wait(nvml: FakeNvml, samples: int) -> None:
    while nvml.asked < samples:
        time.sleep(0.001)


def test_power_and_clock_are_means_and_memory_is_the_most() -> None:
    nvml = FakeNvml()
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        _wait(nvml, 5)
    figures = sampler.figures()
    assert figures.samples >= 5
    assert figures.power_w == 100.0 + 10.0 * (figures.samples - 1)
    assert figures.clock_mhz == 1380
    assert figures.memory_bytes == 3 * GIB
    assert figures.temperature_c == 40 + figures.samples


def test_what_loading_took_can_be_forgotten() -> None:
    nvml = FakeNvml()
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        _wait(nvml, 10)
        sampler.clear()
        before = nvml.asked
        _wait(nvml, before + 3)
    power = sampler.figures().power_w
    assert power is not None and power > 80 + 20 * before


def test_what_a_gpu_does_not_say_is_null() -> None:
    figures = idle_figures(nvml=FakeNvml("power"), seconds=0.01)
    assert figures.power_w is None and figures.clock_mhz == 1380


def test_without_a_driver_nothing_is_sampled_and_the_reason_is_said() -> None:
    nvml = FakeNvml("nvmlInit")
    assert nvml_missing(nvml) == "no NVIDIA GPU: Not Supported"
    assert nvml_missing(FakeNvml(gpus=0)) == "the driver has no GPU"
    assert nvml_missing(FakeNvml()) is None
    figures = idle_figures(nvml=nvml, seconds=0.0)
    assert figures.samples == 0 and figures.power_w is None and figures.memory_bytes is None


@pytest.mark.parametrize(
    ("visible", "index"), [(None, 0), ("", 0), ("2,0", 2), ("GPU-5", 5), ("GPU-unknown", 0), ("MIG-7", 0)]
)
def test_the_gpu_that_is_sampled_is_the_one_that_programs_get(
    visible: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Several(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
            if not uuid[-1].isdecimal():
                raise self.NVMLError("Not Found")
            return int(uuid[-1])

        def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
            return handle

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu(Several()) == index
