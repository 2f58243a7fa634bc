"""A kind of device: an NVIDIA GPU of the catalogue, or the CPU of a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpuprof.domain.share import Share
from gpuprof.domain.validation import Count
from gpuprof.errors import InputError

#: Name of a MIG profile: compute slices, gigabytes, and additional or absent engines.
MIG_NAME = re.compile(r"(?P<slices>\d+)g\.(?P<gigabytes>\d+)gb(?P<engines>[+-](?:me|gfx)(?:\.all)?)?")
#: Relative tolerance of a profile's gigabytes: drivers round them differently.
_ROUNDING_GB = 0.03


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A MIG instance profile of a GPU."""

    name: str  #: Name by ``nvidia-smi mig -lgip``, ``"3g.40gb"``.
    sms: int  #: Streaming multiprocessors of the instance.
    memory_bytes: int  #: Memory of the instance.
    memory_slices: int  #: Number of memory slices, from the start slot on (of 8; of 4 on the A30).
    compute_slices: int  #: Number of compute slices (of 7; of 4 on the A30): the number before the ``g``.
    start_slots: tuple[int, ...]  #: Slots at which the driver places the instance.
    max_count: int  #: Maximum number of instances on a GPU.


def _is_near(profile: MigProfile, gigabytes: int) -> bool:
    match = MIG_NAME.fullmatch(profile.name)
    return match is not None and abs(int(match["gigabytes"]) - gigabytes) <= max(1.0, _ROUNDING_GB * gigabytes)


@dataclass(frozen=True, slots=True)
class SmLimits:
    """Limits of a streaming multiprocessor (NVIDIA's compute-capability tables)."""

    threads: Count
    warps: Count
    blocks: Count
    registers: Count
    shared_memory_bytes: Count
    max_threads_per_block: Count = 1024
    max_registers_per_thread: Count = 255
    max_registers_per_block: Count = 65536
    max_shared_memory_per_block_bytes: Count = 49152


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its specification; values are not measured unless ``sources`` says so.

    Attributes
    ----------
    name : str
        ``"a100-80"``, or for a CPU ``"cpu-amd-epyc-2c"``.
    kind : {"gpu", "cpu"}
    compute_units : int
        Streaming multiprocessors, on a CPU the cores usable by this process.
    clock_mhz : float
        Boost clock (GPU) or nominal clock (CPU).
    flops_per_s : mapping of str to float
        Peak rate by type: ``float32``, ``tfloat32``, ``float16``, ``bfloat16``, ``int8``, ``float64``, and the tensor
        cores' ``float8`` and ``float4``.
        GPUs: dense, tensor cores where the type has them.
    dram_bytes, dram_bytes_per_s, l2_bytes : int, float, int
        Memory size, peak bandwidth, last-level cache.
    compute_capability : str or None
        ``"8.0"``; None on a CPU.
    sm : SmLimits or None
        Limits of one SM; None on a CPU.
    max_power_w : float or None
        Board power limit.
    price_per_hour : float or None
        US dollars, on demand; ``sources`` names the provider. Of several offers, the median.
    price_interval : tuple of (float, float) or None
        Lowest and highest price of the offers; None: a single price.
    price_date : str or None
        Day, month or year of the price, ``"2025-06"``; None: not known.
    mig_slices : int
        Memory slices of the MIG geometry, 0 where the device has no MIG.
    mig_profiles : tuple of MigProfile
    launch_overhead_us : float
        Host time between two dependent launches, not hidden by the device.
    reread_bytes_per_s : tuple of (int, float)
        Pairs of working set in bytes, ascending, and rate at which it is repeatedly read and written: the bandwidth of
        the caches, and beyond them of the memory. Empty: not measured.
    dram_type : str or None
        Kind of the memory, ``"hbm2e"`` or ``"gddr6"``; None: not known.
    process_nm : float or None
        Process node of the GPU, as named by its foundry; None: not known.
    sources : mapping of str to str
        Source of each group of values.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    compute_units: int
    clock_mhz: float
    flops_per_s: Mapping[str, float]
    dram_bytes: int
    dram_bytes_per_s: float
    l2_bytes: int
    compute_capability: str | None = None
    sm: SmLimits | None = None
    max_power_w: float | None = None
    price_per_hour: float | None = None
    price_interval: tuple[float, float] | None = None
    price_date: str | None = None
    mig_slices: int = 0
    mig_profiles: tuple[MigProfile, ...] = ()
    launch_overhead_us: float = 0.0
    reread_bytes_per_s: tuple[tuple[int, float], ...] = ()
    dram_type: str | None = None
    process_nm: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Return the hash of the name: mappings have none, and equal devices have the same name."""
        return hash(self.name)

    def with_price(
        self, per_hour: float | None, interval: tuple[float, float] | None = None, date: str | None = None
    ) -> Device:
        """Return the device at another price."""
        return replace(self, price_per_hour=per_hour, price_interval=interval, price_date=date)

    def mig_profile(self, name: str) -> MigProfile:
        """Return the MIG profile called ``name``.

        Names with other engines (``1g.24gb+me``, ``+gfx``, ``-me``), or with the gigabytes of another driver version
        (``7g.79gb`` for ``7g.80gb``), denote the same profile.

        Raises `InputError` when the device has no such profile.
        """
        for profile in self.mig_profiles:
            if profile.name == name:
                return profile
        if (match := MIG_NAME.fullmatch(name)) is not None:
            slices, gigabytes = int(match["slices"]), int(match["gigabytes"])
            for profile in self.mig_profiles:
                if profile.compute_slices == slices and _is_near(profile, gigabytes):
                    return profile
        names = ", ".join(profile.name for profile in self.mig_profiles) or "none: it has no MIG"
        raise InputError(f"{self.name} has no MIG profile {name!r}", f"it has {names}")

    def fraction(self, share: Share) -> float:
        """Return ``share`` as a fraction of the device's compute units, in (0, 1]."""
        if share.mig is None:
            return share.sm_pct / 100.0
        return share.sm_pct / 100.0 * self.mig_profile(share.mig).sms / self.compute_units

    def granted_fraction(self, share: Share) -> float:
        """Return the fraction of the device's compute units that a process under ``share`` gets, in (0, 1].

        MPS grants pairs of SMs (TPCs), rounded down: on an H200 12, 26, 38, 66 and 92 of 132 SMs for 10, 20, 30, 50
        and 70%.
        """
        if self.kind != "gpu" or share.sm_pct >= 100.0:
            return self.fraction(share)
        pairs = int(self.compute_units * self.fraction(share) / 2.0 + 1e-9)
        return 2.0 * max(pairs, 1) / self.compute_units

    def memory_bytes(self, share: Share) -> int:
        """Return the memory accessible to a process under ``share``: of the MIG instance, else of the device."""
        return self.dram_bytes if share.mig is None else self.mig_profile(share.mig).memory_bytes
