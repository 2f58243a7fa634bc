"""Samples a GPU's power, clock, temperature and memory while something else measures."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from gpuprof.errors import install_hint
from gpuprof.machine.gpu import ask_nvml, decode_nvml, load_nvml

_PERIOD_S = 0.02
_IDLE_S = 1.0
_LEAST_COUNTED_S = 0.5  # the energy counter is brought up to date every tens of milliseconds


@dataclass(frozen=True, slots=True)
class NvmlFigures:
    """Sampled figures; None: not reported by this GPU or driver."""

    #: ``power_w``, ``clock_mhz``: Means; the clock is that of the SMs. Power is taken from the energy counter if
    #: available: NVML's power value is a mean over a past second on many GPUs.
    power_w: float | None
    clock_mhz: float | None
    temperature_c: float | None  #: Highest.
    memory_bytes: int | None  #: Most of the GPU's memory in use, by all processes.
    samples: int
    power_source: str | None = None  #: ``"energy counter"`` or ``"samples"``.


class NvmlSampler:
    """Samples a GPU in a thread while the context is open.

    The GPU is the first seen by CUDA programs here (`visible_gpu`); ``nvml``: replaces ``pynvml``.
    """

    def __init__(self, nvml: Any = None, period_s: float = _PERIOD_S) -> None:
        self._nvml = nvml if nvml is not None else load_nvml()
        self._period_s = period_s
        self._samples: list[tuple[float | None, ...]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._open_handle: Any = None
        self._stopped = False
        self._energy: list[tuple[float, float] | None] = []

    def __enter__(self) -> Self:
        handle = self._open_handle = self._handle()
        self._energy = [self._read_energy()]
        if handle is not None:
            self._thread = threading.Thread(target=self._run, args=(handle,), name="nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self) -> None:
        """Discard the samples so far, taken during the loading of the model."""
        self._samples.clear()
        self._stopped = False
        self._energy = [self._read_energy()]

    def stop(self) -> None:
        """Take no more samples until the next `begin`: pauses follow."""
        self._stopped = True
        self._energy.append(self._read_energy())

    def figures(self) -> NvmlFigures:
        """Return the figures from the last `begin`, or from entering, to `stop`, or until now."""
        columns = list(zip(*list(self._samples), strict=True)) or [()] * 4
        power, clock, temperature, memory = ([v for v in column if v is not None] for column in columns)
        mean_w = self._counted_w()
        return NvmlFigures(
            power_w=mean_w if mean_w is not None else fmean(power) if power else None,
            clock_mhz=fmean(clock) if clock else None,
            temperature_c=max(temperature, default=None),
            memory_bytes=int(max(memory)) if memory else None,
            samples=len(self._samples),
            power_source="energy counter" if mean_w is not None else "samples" if power else None,
        )

    def _counted_w(self) -> float | None:
        """Return the mean power from the energy counter; None without a counter or for too short a time."""
        points = [p for p in (*self._energy, *([] if self._stopped else [self._read_energy()])) if p is not None]
        if len(points) < 2 or points[-1][0] - points[0][0] < _LEAST_COUNTED_S or points[-1][1] <= points[0][1]:
            return None
        return (points[-1][1] - points[0][1]) / 1e3 / (points[-1][0] - points[0][0])

    def _read_energy(self) -> tuple[float, float] | None:
        """Return the moment in seconds and the energy in millijoules."""
        if self._open_handle is None:
            return None
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._open_handle)
        return None if energy is None else (time.monotonic(), float(energy))

    def _handle(self) -> Any:
        if self._nvml is None:
            return None
        try:
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByIndex(visible_gpu(self._nvml))
        except self._nvml.NVMLError:
            return None

    def _run(self, handle: Any) -> None:
        nvml = self._nvml
        while True:
            power = self._ask("nvmlDeviceGetPowerUsage", handle)
            clock = self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_SM", 1))
            temperature = self._ask("nvmlDeviceGetTemperature", handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0))
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            # Memory of all processes: often, as in containers, NVML does not report it per process.
            memory_bytes = None if memory is None else float(memory.used)
            if not self._stopped:
                self._samples.append((None if power is None else power / 1000.0, clock, temperature, memory_bytes))
            # Waits for the end instead of sleeping, so that leaving does not take a period longer.
            if self._over.wait(self._period_s):
                return

    def _ask(self, function: str, *arguments: Any) -> Any:
        return ask_nvml(self._nvml, function, *arguments)


def visible_gpu(nvml: Any) -> int:
    """Return the index, in driver order, of the first GPU seen by CUDA programs here.

    ``CUDA_VISIBLE_DEVICES`` names the GPU by its index under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, the driver's own order,
    or by its UUID; 0 without a named GPU.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.isdecimal():
        return int(first)
    if first.startswith("GPU-"):
        with suppress(nvml.NVMLError, AttributeError):
            return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(first)))
    return 0


def idle_figures(nvml: Any = None, seconds: float = _IDLE_S) -> NvmlFigures:
    """Return an idle GPU's power, and the memory held by other processes."""
    with NvmlSampler(nvml=nvml) as sampler:
        time.sleep(seconds)
    return sampler.figures()


def nvml_unavailable_reason(nvml: Any = None) -> str | None:
    """Return None when NVML responds and has a GPU, else the reason in a line."""
    module = nvml if nvml is not None else load_nvml()
    if module is None:
        return f"nvidia-ml-py is not installed: {install_hint('gpu')}"
    try:
        module.nvmlInit()
        return None if module.nvmlDeviceGetCount() else "the driver has no GPU"
    except module.NVMLError as error:
        return f"no NVIDIA GPU: {error}"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if not reported."""
    module = load_nvml()
    if module is None:
        return None
    with suppress(module.NVMLError, AttributeError):
        module.nvmlInit()
        return decode_nvml(module.nvmlSystemGetDriverVersion())
    return None
