"""Describes the GPUs of this machine as devices, from the catalogue and from NVML.

A board in the catalogue takes its data from there, with memory, power limit and MIG profiles as reported by the driver.
Another board of a known compute capability is described from NVML, with rates scaled from the catalogue's GPU of that
capability nearest in size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import byref, c_uint
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpuprof.domain.catalogue import GpuDescription, describe_device, device_of_driver, device_slug, devices
from gpuprof.domain.device import Device, MigProfile
from gpuprof.errors import UnavailableError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import Gpu, MigInstance
import ctypes
from importlib import import_module

_POSSIBLE_PLACEMENTS = "nvmlDeviceGetGpuInstancePossiblePlacements"


def local_gpus(nvml: Any = None) -> tuple[Device, ...]:
    """Return a device for each NVIDIA GPU of this machine, in driver order; empty without a driver.

    ``nvml``: in place of ``pynvml``.

    Notes
    -----
    A GPU of a compute capability missing from the catalogue is left out: its limits are unknown.
    """
    nvml = nvml or load_nvml()
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(description for handle in handles if (description := _describe_device(nvml, handle)) is not None)
    finally:
        nvml.nvmlShutdown()


def _describe_device(nvml: Any, handle: Any) -> Device | None:
    driver_name = decode_nvml(nvml.nvmlDeviceGetName(handle))
    catalogued = device_of_driver(driver_name)
    base = catalogued or _scale_device(nvml, handle, driver_name)
    if base is None:
        return None
    profiles = _read_mig_profiles(nvml, handle)
    power_mw = ask_nvml(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    sources = {**base.sources, "memory": f"{base.sources['memory']}; size as NVML reports it"}
    if power_mw is not None:
        sources["power"] = "NVML: the limit in force"
    if profiles:
        sources["mig"] = "NVML"
    return replace(
        base,
        dram_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        max_power_w=base.max_power_w if power_mw is None else power_mw / 1000.0,
        mig_profiles=profiles or base.mig_profiles,
        mig_slices=max((p.start_slots[-1] + p.memory_slices for p in profiles), default=base.mig_slices),
        sources=MappingProxyType(sources),
    )


def _scale_device(nvml: Any, handle: Any, driver_name: str) -> Device | None:
    """Describe a board missing from the catalogue, from a board of the same compute capability."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    cores = ask_nvml(nvml, "nvmlDeviceGetNumGpuCores", handle)
    bus_bits = ask_nvml(nvml, "nvmlDeviceGetMemoryBusWidth", handle)
    siblings = [gpu for gpu in devices().values() if gpu.compute_capability == f"{major}.{minor}"]
    if not siblings or cores is None or bus_bits is None:
        return None
    # A core of CUDA does two float32 operations per cycle.
    peak = siblings[0].flops_per_s["float32"] / (2 * siblings[0].compute_units * siblings[0].clock_mhz * 1e6)
    cores_per_sm = round(peak / 64) * 64
    memory_clock = float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    description = GpuDescription(
        driver_name,
        f"{major}.{minor}",
        sms=round(cores / cores_per_sm),
        clock_mhz=float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        # Times two: NVML's memory clock counts only one of two transfers per cycle.
        memory_bytes_per_s=bus_bits / 8 * memory_clock * 1e6 * 2,
    )
    scaled = describe_device(description, "NVML")
    if scaled is None:
        return None
    memory = (
        f"bandwidth = bus width x memory clock x 2 as NVML reports them; L2 as of the nearest {major}.{minor} board"
    )
    return replace(
        scaled, sources=MappingProxyType({**scaled.sources, "memory": memory, "price": "none: this machine"})
    )


def _read_mig_profiles(nvml: Any, handle: Any) -> tuple[MigProfile, ...]:
    """Return the driver's plain MIG profiles with their start slots; empty when the driver reports none."""
    profiles = {}
    for number in range(getattr(nvml, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0)):
        info = ask_nvml(nvml, "nvmlDeviceGetGpuInstanceProfileInfo", handle, number)
        if info is None:
            continue
        name = decode_nvml(info.name).removeprefix("MIG ").strip()
        # "1g.10gb+me" is the same instance with media engines, which inference has no use for.
        if "+" in name or not re.fullmatch(r"\d+g\.\d+gb", name):
            continue
        places = _read_placements(nvml, handle, info.id)
        # All profiles or none: a partial list would rule out valid layouts.
        if not places:
            return ()
        profiles[name] = MigProfile(
            name=name,
            sms=int(info.multiprocessorCount),
            memory_bytes=int(info.memorySizeMB) * 2**20,
            memory_slices=places[0][1],
            compute_slices=int(info.sliceCount),
            start_slots=tuple(sorted(start for start, _ in places)),
            max_count=int(info.instanceCount),
        )
    return tuple(sorted(profiles.values(), key=lambda p: (p.compute_slices, p.memory_slices)))


def _read_placements(nvml: Any, handle: Any, profile_id: int) -> list[tuple[int, int]]:
    """Return (start, size) of every placement of the profile; empty when the driver withholds them from non-root
    users.
    """
    # NVML's protocol: a call without a buffer returns the number of placements, a second call the placements.
    count = c_uint(0)
    if ask_nvml(nvml, _POSSIBLE_PLACEMENTS, handle, profile_id, None, byref(count)) is None or not count.value:
        return []
    places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if ask_nvml(nvml, _POSSIBLE_PLACEMENTS, handle, profile_id, places, byref(count)) is None:
        return []
    return [(int(place.start), int(place.size)) for place in places[: count.value]]


def device_name(driver_name: str) -> str:
    """Return gpuprof's name of a board: from the catalogue, else derived from the driver's name."""
    catalogued = device_of_driver(driver_name)
    return device_slug(driver_name) if catalogued is None else catalogued.name


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


def load_nvml() -> Any:
    """Return the module ``pynvml``; None if nvidia-ml-py is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def ask_nvml(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None for a query unsupported by the GPU, the driver or the binding."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def decode_nvml(text: str | bytes) -> str:
    """Return a text of NVML, which older bindings return as bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


_DRIVER = "libcuda.so.1"
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def visible_sms(driver: str = _DRIVER) -> int | None:
    """Return the SMs of the first GPU available to this process; None without a driver or an answer from the driver.

    An MPS client sees its percentage of the SMs. ``driver``: CUDA's driver library.
    """
    try:
        # The driver rather than NVML: only the driver reports the SMs granted to this process.
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    device, count = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device):
        return None
    return count.value
