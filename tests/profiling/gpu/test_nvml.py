from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gpuprof.profiling.gpu.nvml import NvmlSampler, idle_figures, nvml_unavailable_reason, visible_gpu
from tests.profiling.fake_nvml import GIB, FakeNvml
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


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


def test_neither_loading_nor_pauses_after_the_timing_are_sampled() -> None:
    nvml = FakeNvml()
    nvml.energy_mj = 5_000.0  # of a time too short for it
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        _wait(nvml, 10)
        sampler.begin()
        before = nvml.asked
        _wait(nvml, before + 3)
        sampler.stop()
        kept = sampler.figures()
        _wait(nvml, nvml.asked + 20)  # the GPU is asked on, and nothing of it kept
    assert sampler.figures().samples == kept.samples and kept.power_source == "samples"
    assert kept.power_w is not None and kept.power_w > 80 + 20 * before


def test_power_is_what_the_energy_counter_says_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        "gpuprof.profiling.gpu.nvml.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    nvml = FakeNvml()
    nvml.energy_mj = 5_000.0
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        nvml.energy_mj, clock[0] = 9_000.0, 101.0  # loading
        sampler.begin()
        nvml.energy_mj, clock[0] = 1_409_000.0, 103.0
        sampler.stop()
        nvml.energy_mj, clock[0] = 1_410_000.0, 130.0  # pauses
    figures = sampler.figures()
    assert figures.power_w == pytest.approx(700.0) and figures.power_source == "energy counter"


def test_what_a_gpu_does_not_say_is_null() -> None:
    figures = idle_figures(nvml=FakeNvml("power"), seconds=0.01)
    assert figures.power_w is None and figures.clock_mhz == 1380


def test_without_a_driver_nothing_is_sampled_and_the_reason_is_said() -> None:
    nvml = FakeNvml("nvmlInit")
    assert nvml_unavailable_reason(nvml) == "no NVIDIA GPU: Not Supported"
    assert nvml_unavailable_reason(FakeNvml(gpus=0)) == "the driver has no GPU"
    assert nvml_unavailable_reason(FakeNvml()) is None
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
