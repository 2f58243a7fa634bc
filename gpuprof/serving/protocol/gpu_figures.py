"""Utilisation and memory of this machine's GPUs and MIG instances, from NVML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpuprof.machine.nvml import load_nvml
from gpuprof.serving.machine.gpu_places import LocalGpu, list_local_gpus


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """A GPU or a MIG instance at a moment."""

    index: int  #: Index of the GPU.
    mig: str  #: Profile and first slice, empty for a whole GPU.
    uuid: str
    #: Fraction of the last sample period with a running kernel; None where NVML has no value, as for MIG instances.
    sm_ratio: float | None
    memory_bytes: int
    memory_total_bytes: int


def local_gpu_figures(nvml: Any = None) -> tuple[GpuFigures, ...]:
    """Return the figures of every GPU and MIG instance, none without NVML.

    Figures that NVML does not provide, because a device is lost or a permission is missing, are left out: serving
    must not depend on them.
    """
    gpus = _find_gpus() if nvml is None else (nvml, list_local_gpus(nvml))
    return () if gpus is None else tuple(_figures(*gpus))


@cache
def _find_gpus() -> tuple[Any, tuple[LocalGpu, ...]] | None:
    nvml = load_nvml()
    return None if nvml is None else (nvml, list_local_gpus(nvml))


def _figures(nvml: Any, gpus: tuple[LocalGpu, ...]) -> Iterator[GpuFigures]:
    for gpu in gpus:
        places = [("", gpu.uuid)] + [(f"{i.profile}@{i.start}", i.uuid) for i in gpu.instances]
        for mig, uuid in places:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError:
                continue
            yield GpuFigures(gpu.index, mig, uuid, _sm_ratio(nvml, handle), int(memory.used), int(memory.total))


def _sm_ratio(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
    except nvml.NVMLError:
        return None
