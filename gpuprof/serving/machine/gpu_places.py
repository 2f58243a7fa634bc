"""Finds this machine's GPUs and MIG instances for a deployment map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuprof.errors import UnavailableError
from gpuprof.machine.nvml import decode_nvml, load_nvml

if TYPE_CHECKING:
    from gpuprof.domain.deployment import Gpu, MigInstance

_DOCTOR = "see gpuprof doctor"


@dataclass(frozen=True, slots=True)
class LocalMigInstance:
    """An existing MIG instance: profile, first memory slice, UUID."""

    profile: str
    start: int
    uuid: str


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """A GPU of this machine: its device's name in the catalogue, its UUID, its MIG instances."""

    index: int
    device: str
    uuid: str
    instances: tuple[LocalMigInstance, ...] = ()

    def find_uuid(self, mig: MigInstance | None) -> str:
        """Return the UUID of the whole GPU, or of a MIG instance.

        Raises `UnavailableError` when the instance does not exist, or the map wants the whole GPU and it is
        partitioned.
        """
        if mig is None:
            if self.instances:
                raise UnavailableError(
                    f"GPU {self.index} is cut into MIG instances, but the map wants it whole", _DOCTOR
                )
            return self.uuid
        for instance in self.instances:
            if (instance.profile, instance.start) == (mig.profile, mig.start):
                return instance.uuid
        raise UnavailableError(
            f"GPU {self.index} has no MIG instance {mig.profile} at slice {mig.start}",
            f"create it: nvidia-smi mig -i {self.index} -cgi {mig.profile}:{mig.start} -C",
        )


def list_local_gpus(nvml: Any = None) -> tuple[LocalGpu, ...]:
    """Return the GPUs that NVML lists, none where NVML is not installed or finds no driver."""
    nvml = nvml or load_nvml()
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
        return tuple(_read_gpu(nvml, index) for index in range(int(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError:
        return ()


def find_gpu(gpu: Gpu, places: tuple[LocalGpu, ...]) -> LocalGpu:
    """Return the GPU of this machine for an entry of the map.

    Raises `UnavailableError` when no GPU has this index, or it is another device.
    """
    for place in places:
        if place.index == gpu.index:
            if place.device != gpu.device:
                raise UnavailableError(
                    f"the map wants {gpu.device} as GPU {gpu.index}, which is {place.device} here", _DOCTOR
                )
            return place
    raise UnavailableError(f"the map uses {gpu.device} as GPU {gpu.index}, which this machine does not have", _DOCTOR)


def _read_gpu(nvml: Any, index: int) -> LocalGpu:
    from gpuprof.machine.gpu import device_name

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = device_name(decode_nvml(nvml.nvmlDeviceGetName(handle)))
    return LocalGpu(index, name, decode_nvml(nvml.nvmlDeviceGetUUID(handle)), tuple(_list_instances(nvml, handle)))


def _list_instances(nvml: Any, handle: Any) -> Iterator[LocalMigInstance]:
    try:
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError:  # no MIG
        return
    for number in range(count):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # not every number is taken
            continue
        owner = nvml.nvmlDeviceGetGpuInstanceById(handle, nvml.nvmlDeviceGetGpuInstanceId(mig))
        start = int(nvml.nvmlGpuInstanceGetInfo(owner).placement.start)
        profile = decode_nvml(nvml.nvmlDeviceGetName(mig)).rsplit("MIG ", 1)[-1]
        yield LocalMigInstance(profile, start, decode_nvml(nvml.nvmlDeviceGetUUID(mig)))
