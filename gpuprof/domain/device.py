"""A kind of device: an NVIDIA GPU of the catalogue, or the CPU of a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpuprof.domain.share import Share
from gpuprof.errors import InputError

#: A MIG profile's name: compute slices, gigabytes, and engines beside the usual ones.
MIG_NAME = re.compile(r"(?P<slices>\d+)g\.(?P<gigabytes>\d+)gb(?P<engines>[+-](?:me|gfx)(?:\.all)?)?")
#: Drivers round a profile's memory by their own rules.
_ROUNDING_GB = 0.03


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One MIG instance profile of a GPU."""

    name: str  #: As ``nvidia-smi mig -lgip`` prints it, ``"3g.40gb"``.
    sms: int  #: Streaming multiprocessors of the instance.
    memory_bytes: int  #: Memory of the instance.
    memory_slices: int  #: Memory slices (of 8, on A30 of 4) that it takes from its start slot on.
    compute_slices: int  #: Compute slices (of 7, on A30 of 4) that it takes: the number before the ``g``.
    start_slots: tuple[int, ...]  #: The only slots at which the driver places it.
    max_count: int  #: How many of them the driver allows on one GPU.


def _is_near(profile: MigProfile, gigabytes: int) -> bool:
    named = MIG_NAME.fullmatch(profile.name)
    return named is not None and abs(int(named["gigabytes"]) - gigabytes) <= max(1.0, _ROUNDING_GB * gigabytes)


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one streaming multiprocessor can hold (NVIDIA's compute-capability tables)."""

    threads: int
    warps: int
    blocks: int
    registers: int
    shared_memory_bytes: int
    max_registers_per_thread: int = 255
    max_registers_per_block: int = 65536
    max_shared_memory_per_block_bytes: int = 49152


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its numbers; nothing measured is in here unless ``sources`` says so.

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
        US dollars, on demand; ``sources`` says whose price it is.
    mig_slices : int
        Memory slices of the MIG geometry, 0 where the device has no MIG.
    mig_profiles : tuple of MigProfile
    launch_overhead_us : float
        Host time between two dependent launches that the device cannot hide.
    reread_bytes_per_s : tuple of (int, float)
        At what rate bytes are read and written again and again, by how many they are, ascending: what the caches
        deliver, and beyond them the memory. Empty: not measured.
    dram_type : str or None
        Kind of the memory, ``"hbm2e"`` or ``"gddr6"``; None: not known.
    process_nm : float or None
        Process that the GPU is made in, as its foundry calls it; None: not known.
    sources : mapping of str to str
        Where each group of numbers was read.
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
    mig_slices: int = 0
    mig_profiles: tuple[MigProfile, ...] = ()
    launch_overhead_us: float = 0.0
    reread_bytes_per_s: tuple[tuple[int, float], ...] = ()
    dram_type: str | None = None
    process_nm: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def mig_profile(self, name: str) -> MigProfile:
        """Return the MIG profile called ``name``.

        Other engines (``1g.24gb+me``, ``+gfx``, ``-me``) and the gigabytes that another driver version prints
        (``7g.79gb`` for ``7g.80gb``) name the same profile.

        Raises
        ------
        InputError
            When the device has no such profile.
        """
        for profile in self.mig_profiles:
            if profile.name == name:
                return profile
        if (match := MIG_NAME.fullmatch(name)) is not None:
            slices, gigabytes = int(match["slices"]), int(match["gigabytes"])
            for profile in self.mig_profiles:
                if profile.compute_slices == slices and _is_near(profile, gigabytes):
                    return profile
        known = ", ".join(profile.name for profile in self.mig_profiles) or "none: it has no MIG"
        raise InputError(f"{self.name} has no MIG profile {name!r}", f"it has {known}")

    def fraction(self, share: Share) -> float:
        """Return the fraction of the device's compute units that ``share`` is, in (0, 1]."""
        if share.mig is None:
            return share.sm_pct / 100.0
        return share.sm_pct / 100.0 * self.mig_profile(share.mig).sms / self.compute_units

    def memory_bytes(self, share: Share) -> int:
        """Return the memory that a process under ``share`` can reach: the MIG instance's, or all."""
        return self.dram_bytes if share.mig is None else self.mig_profile(share.mig).memory_bytes
