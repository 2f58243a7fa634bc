"""GPUs described by drivers or reports, matched to the catalogue or scaled from a similar device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpuprof.domain.catalogue import device_of_driver, devices
from gpuprof.domain.device import Device, SmLimits


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """Properties of a board; None: not given."""

    name: str  #: Name by the driver, ``"NVIDIA H100 80GB HBM3"``.
    compute_capability: str | None = None  #: ``"9.0"``.
    sms: int | None = None
    clock_mhz: float | None = None  #: Highest clock of the SMs.
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    #: ``warps_per_sm``, ``registers_per_sm``, ``shared_bytes_per_sm``, ``shared_bytes_per_block``: Limits of an SM and
    #: of a block, for a block the opt-in maximum.
    warps_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
    shared_bytes_per_block: int | None = None


def describe_device(description: GpuDescription, source: str = "the report") -> Device | None:
    """Return the device of this name in the catalogue, else a device scaled from a board of equal compute capability.

    ``source``: origin of the description, for ``Device.sources``.

    Returns
    -------
    Device or None
        None for a device outside the catalogue whose number of SMs is missing, or whose compute capability is missing
        or not in the catalogue.
    """
    catalogued = device_of_driver(description.name)
    if catalogued is not None:
        return catalogued
    siblings = [gpu for gpu in devices().values() if gpu.compute_capability == description.compute_capability]
    if not siblings or description.compute_capability is None or not description.sms:
        return None
    sms = description.sms
    base = min(siblings, key=lambda gpu: (abs(gpu.compute_units - sms), gpu.name))
    clock = description.clock_mhz or base.clock_mhz
    ratio = sms * clock / (base.compute_units * base.clock_mhz)
    bandwidth = description.memory_bytes_per_s or base.dram_bytes_per_s
    return replace(
        base,
        name=device_slug(description.name),
        compute_units=sms,
        clock_mhz=clock,
        flops_per_s=MappingProxyType({dtype: rate * ratio for dtype, rate in base.flops_per_s.items()}),
        dram_bytes=description.memory_bytes or base.dram_bytes,
        dram_bytes_per_s=bandwidth,
        l2_bytes=description.l2_bytes or base.l2_bytes,
        sm=None if base.sm is None else _scale_limits(description, base.sm),
        # These values do not scale from another board, and guesses would enter plans as facts.
        max_power_w=None,
        price_per_hour=None,
        mig_slices=0,
        mig_profiles=(),
        sources=MappingProxyType(_describe_sources(description, base, source)),
    )


def device_slug(driver_name: str) -> str:
    """Return the device name for a driver's name: ``"NVIDIA L40S"`` gives ``"l40s"``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"nvidia|tesla", "", driver_name.lower())).strip("-") or "gpu"


def _scale_limits(description: GpuDescription, base: SmLimits) -> SmLimits:
    block = description.shared_bytes_per_block or base.max_shared_memory_per_block_bytes
    return replace(
        base,
        warps=description.warps_per_sm or base.warps,
        threads=32 * (description.warps_per_sm or base.warps),
        registers=description.registers_per_sm or base.registers,
        shared_memory_bytes=description.shared_bytes_per_sm or base.shared_memory_bytes,
        max_shared_memory_per_block_bytes=max(block, base.max_shared_memory_per_block_bytes),
    )


def _describe_sources(description: GpuDescription, base: Device, source: str) -> dict[str, str]:
    reported = {
        "clock": description.clock_mhz,
        "memory": description.memory_bytes,
        "bandwidth": description.memory_bytes_per_s,
        "L2": description.l2_bytes,
    }
    missing = [name for name, value in reported.items() if not value]
    assumed = f"; {', '.join(missing)} as of {base.name}" if missing else ""
    return {
        "name": description.name,
        "compute": f"in proportion to {base.name}, by SMs and clock that {source} reports{assumed}",
        "memory": f"as {source} reports it{assumed}",
        "limits": base.sources["limits"],
        "power": "unknown",
        "price": "none: this board is not in the catalogue",
    }
