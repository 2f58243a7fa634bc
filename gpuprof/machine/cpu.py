"""Describes the CPU of this machine as a device: the cores available to this process and their peak rates.

Nothing is measured here. Peak rates follow from cores, nominal clock and vector units; the memory bandwidth is not
reported by any interface and is assumed low. Profiling measures ceilings that replace both.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.machine.cgroup import cpu_quota_cores, memory_limit_bytes, read_text, usable_cores
from gpuprof.machine.cores import allowed_cores

#: Bandwidth assumed without a measurement: easily reached by a core of a server.
ASSUMED_BYTES_PER_S_A_CORE = 8e9

_ASSUMED_CLOCK_MHZ = 2000.0
_ASSUMED_CACHE_BYTES = 2**20
_NOISE = re.compile(r"\((?:r|tm|c)\)|@.*$|\b(?:cpu|processor|\d+-core|with radeon.*)\b", re.IGNORECASE)
_GHZ = re.compile(r"@\s*(?P<ghz>\d+(?:\.\d+)?)\s*GHz", re.IGNORECASE)
_SIZE = re.compile(r"(?P<number>\d+)(?P<unit>[KMG]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Data of ``/proc/cpuinfo`` for the processors available to this process."""

    model: str  #: ``"AMD EPYC"``; without a name, the machine's architecture.
    vendor: str
    family: int  #: CPU family of the vendor; 0 if unknown.
    flags: frozenset[str]  #: CPU feature flags, such as vector extensions.
    mhz: float | None  #: Current clock; on virtual machines the nominal clock.
    physical_cores: int  #: Physical cores of the usable processors: two hyper-threads share a core.


def local_cpu(root: Path = Path("/"), affinity: Collection[int] | None = None) -> Device:
    """Return this machine's CPU, limited to the cores available to this process.

    ``root``: root of the file system with ``/proc`` and ``/sys``; ``affinity``: processors to use; by default this
    process's affinity.
    """
    allowed = sorted(allowed_cores() if affinity is None else affinity)
    quota = cpu_quota_cores(root)
    units = usable_cores(len(allowed), quota)
    info = read_cpuinfo(root, allowed[:units])
    clock, clock_source = _clock_mhz(root, info, allowed[0])
    cores = min(float(info.physical_cores), quota or math.inf)
    slug = re.sub(r"[^a-z0-9]+", "-", _NOISE.sub(" ", info.model).lower()).strip("-")
    per_cycle, basis = flops_per_cycle(info)
    memory, memory_source = _memory(root)
    return Device(
        name=f"cpu-{slug or 'unknown'}-{units}c",
        kind="cpu",
        compute_units=units,
        clock_mhz=clock,
        flops_per_s={dtype: cores * clock * 1e6 * rate for dtype, rate in per_cycle.items()},
        dram_bytes=memory,
        dram_bytes_per_s=ASSUMED_BYTES_PER_S_A_CORE * units,
        l2_bytes=_last_level_cache(root, allowed[0]),
        sources={
            "name": info.model,
            "compute": f"computed: {cores:g} cores x {clock:.0f} MHz ({clock_source}) x {basis}; "
            "a boosted clock gives more",
            "memory": f"{memory_source}; bandwidth assumed, {ASSUMED_BYTES_PER_S_A_CORE / 1e9:g} GB/s a core, "
            "until it is measured",
            "price": "none: this machine",
        },
    )


def read_cpuinfo(root: Path, processors: Collection[int]) -> CpuInfo:
    """Return the data of ``/proc/cpuinfo``; missing fields get the most conservative value."""
    blocks = [_fields(block) for block in read_text(root / "proc/cpuinfo").split("\n\n") if block.strip()]
    own_blocks = [block for block in blocks if block.get("processor", "-1") in {str(number) for number in processors}]
    first = (own_blocks or blocks or [{}])[0]
    family = first.get("cpu family", "0")
    mhz = first.get("cpu MHz", "")
    # Hyper-threads of a core have the same pair; Arm and some virtual machines report no cores.
    places = {(block.get("physical id"), block.get("core id")) for block in own_blocks if "core id" in block}
    return CpuInfo(
        model=first.get("model name") or platform.machine() or "unknown",
        vendor=first.get("vendor_id") or first.get("CPU implementer", ""),
        family=int(family) if family.isdigit() else 0,
        flags=frozenset((first.get("flags") or first.get("Features", "")).split()),
        mhz=float(mhz) if re.fullmatch(r"\d+(\.\d+)?", mhz) and float(mhz) > 0 else None,
        physical_cores=len(places) or max(1, len(processors)),
    )


def flops_per_cycle(info: CpuInfo) -> tuple[Mapping[str, float], str]:
    """Return a core's operations per cycle by type, and a description of their basis.

    A multiply-add is two operations and a core has two vector pipes. AMD before family 26 (Zen 5) runs a 512-bit
    operation as two halves. Half precision without its own instructions is computed in ``float32``.
    """
    bits, instructions = _vector_bits(info)
    fused = 2 if info.flags & {"fma", "avx512f", "asimd", "sve"} else 1
    # Two pipes, each with a multiply-add (two operations) on every lane of 32 bits.
    single = 2.0 * fused * bits / 32
    # int8 without dot-product instructions: three operations (multiply, widen, add) on four times as many elements.
    rates = {"float64": single / 2, "float32": single, "float16": single, "bfloat16": single, "int8": single * 4 / 3}
    if info.flags & {"avx512_fp16", "asimdhp", "fphp"}:
        rates["float16"] = 2 * single
    if info.flags & {"avx512_bf16", "avx_bf16", "bf16"}:
        rates["bfloat16"] = 2 * single
    if info.flags & {"avx512_vnni", "avx_vnni", "asimddp"}:
        rates["int8"] = 4 * single
    # AMX: every 16 cycles a product of tiles, 16 x 32 by 32 x 16 in bfloat16 and twice as deep in int8.
    if "amx_bf16" in info.flags:
        rates["bfloat16"] = 1024.0
    if "amx_int8" in info.flags:
        rates["int8"] = 2048.0
    return rates, f"{single:g} float32 operations a cycle ({instructions})"


def _vector_bits(info: CpuInfo) -> tuple[int, str]:
    flags = info.flags
    if "avx512f" in flags:
        if info.vendor == "AuthenticAMD" and info.family < 26:
            return 256, "AVX-512 in two halves"
        return 512, "AVX-512"
    if "avx" in flags:
        return 256, "AVX2 and FMA" if "fma" in flags else "AVX"
    return 128, "128-bit vectors"


def _clock_mhz(root: Path, info: CpuInfo, processor: int) -> tuple[float, str]:
    base = read_text(root / f"sys/devices/system/cpu/cpu{processor}/cpufreq/base_frequency").strip()
    if base.isdigit() and int(base) > 0:
        return int(base) / 1000.0, "base frequency"
    if match := _GHZ.search(info.model):
        return float(match["ghz"]) * 1000.0, "in its name"
    if info.mhz is not None:
        return info.mhz, "/proc/cpuinfo"
    return _ASSUMED_CLOCK_MHZ, "assumed"


def _last_level_cache(root: Path, processor: int) -> int:
    sizes: dict[int, int] = {}
    for index in sorted((root / f"sys/devices/system/cpu/cpu{processor}/cache").glob("index*")):
        level, size = read_text(index / "level").strip(), _SIZE.fullmatch(read_text(index / "size").strip())
        if level.isdigit() and size:
            sizes[int(level)] = int(size["number"]) * _UNITS[size["unit"]]
    return sizes[max(sizes)] if sizes else _ASSUMED_CACHE_BYTES


def _memory(root: Path) -> tuple[int, str]:
    total = _fields(read_text(root / "proc/meminfo")).get("MemTotal", "")
    match = re.fullmatch(r"(\d+) kB", total)
    machine = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit_bytes(root)
    if limit is not None and limit < machine:
        return limit, "size: the control group's limit"
    return machine, "size: /proc/meminfo"


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
