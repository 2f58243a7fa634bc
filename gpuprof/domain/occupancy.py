"""Theoretical occupancy: resident blocks of a kernel per SM, their limiting factors, and SM utilisation of a grid.

The allocation rules of NVIDIA's hardware and driver (CUDA C++ Best Practices Guide, "Occupancy"; CUDA C++ Programming
Guide, "Technical Specifications per Compute Capability"), for compute capability 3.7 to 10.x:

- warps: a block takes whole warps;
- registers: a warp takes its registers in units of 256 from a single partition of the SM, and a block must fit the
  register file with its warps spread evenly over the partitions;
- shared memory: a block takes its bytes, plus 1 KiB for the driver from 8.0 on, in units of 256 bytes (to 7.x) or 128
  bytes, within the SM's carve-out;
- blocks: an SM has a limited number of slots.

Launches with partitioned global caching (5.2, 6.1) or thread-block clusters (9.0) are not modelled.

Elvinger's thesis (2024, §5.3.2) uses the same four bounds without allocation units and the driver's part; its SM
utilisation is computed here with the exact number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuprof.domain.device import Device, SmLimits
from gpuprof.errors import InputError

WARP = 32
MAX_THREADS_PER_BLOCK = 1024

#: Factors limiting the blocks of an SM, in the order of the rows of `Occupancies.limits`.
FACTORS = ("warps", "registers", "shared_memory", "blocks")

#: Allocation unit of a warp's registers, for every compute capability here.
_REGISTER_UNIT = 256
#: Shared memory reserved per block by the driver from 8.0 on.
_DRIVER_SHARED_BYTES = 1024
#: Value of a limit without effect.
_UNLIMITED = 2**31 - 1
_KIB = 1024

# Settings of an SM's shared memory by compute capability, in KiB; the rest of the memory is L1 cache.
_CARVEOUTS_KIB: Mapping[tuple[int, int], tuple[int, ...]] = {
    (7, 0): (0, 8, 16, 32, 64, 96),
    (7, 2): (0, 8, 16, 32, 64, 96),
    (7, 5): (32, 64),
    (8, 0): (0, 8, 16, 32, 64, 100, 132, 164),
    (8, 6): (0, 8, 16, 32, 64, 100),
    (8, 7): (0, 8, 16, 32, 64, 100, 132, 164),
    (8, 9): (0, 8, 16, 32, 64, 100),
    (9, 0): (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
    (10, 0): (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
    (10, 3): (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
    (12, 0): (0, 8, 16, 32, 64, 100),
}

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def cap_occupancy(sums: ArrayLike) -> Floats:
    """Return sums of concurrent kernels' occupancies, in percent, capped at 100.

    Occupancies and SM utilisations are measured on kernels alone. Where the sum over concurrent kernels exceeds 100%,
    blocks wait for one another, and the device is fully occupied. USHER (§3.2) and the thesis (eq. 5.3) use sums and do
    not define values above 100; the thesis's Table A.1 goes up to 100.00. This cap applies to all sums: in profiles, in
    the GK-Estimator, and in policies (for imported databases).
    """
    return np.minimum(np.asarray(sums, dtype=np.float64), 100.0)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel launch, as reported by a profiler."""

    blocks: int  #: Blocks of the grid: the product of its dimensions.
    threads_per_block: int  #: The product of the block's dimensions.
    registers_per_thread: int
    #: ``static_shared_bytes``, ``dynamic_shared_bytes``: Shared memory of a block, without the driver's part.
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Theoretical occupancy of a launch on a GPU."""

    blocks_per_sm: int  #: Resident blocks per SM; 0 when the launch cannot run.
    occupancy_pct: float  #: Warps of the resident blocks in percent of the SM's maximum.
    limits: Mapping[str, int]  #: `FACTORS` → blocks per SM under this factor alone.
    limiting: tuple[str, ...]  #: The factors with the lowest limit.
    waves: float  #: Blocks over the resident blocks of the whole GPU; NaN when the launch cannot run.
    #: SMs needed for all blocks at once (thesis §5.3.2, ``num_sms_needed``); 0 when the launch cannot run.
    sms_needed: int
    #: ``sms_needed`` in percent of the GPU's SMs, at most 100; NaN when the launch cannot run.
    sm_utilization_pct: float
    #: Highest achievable mean over all SMs: ``occupancy_pct``, or less where the grid has too few warps to fill the
    #: SMs; NaN when the launch cannot run.
    average_occupancy_pct: float


@dataclass(frozen=True, slots=True)
class Occupancies:
    """`Occupancy` of many launches, in arrays of shape (n,); ``limits`` has shape (4, n), its rows as `FACTORS`."""

    blocks_per_sm: Integers
    occupancy_pct: Floats
    limits: Integers
    waves: Floats
    sms_needed: Integers
    sm_utilization_pct: Floats
    average_occupancy_pct: Floats

    def __getitem__(self, index: int) -> Occupancy:
        limits = dict(zip(FACTORS, (int(limit) for limit in self.limits[:, index]), strict=True))
        blocks_per_sm = int(self.blocks_per_sm[index])
        return Occupancy(
            blocks_per_sm=blocks_per_sm,
            occupancy_pct=float(self.occupancy_pct[index]),
            limits=limits,
            limiting=tuple(name for name, limit in limits.items() if limit == blocks_per_sm),
            waves=float(self.waves[index]),
            sms_needed=int(self.sms_needed[index]),
            sm_utilization_pct=float(self.sm_utilization_pct[index]),
            average_occupancy_pct=float(self.average_occupancy_pct[index]),
        )


def occupancy(device: Device, launch: KernelLaunch, carveout_pct: int | None = None) -> Occupancy:
    """Return the theoretical occupancy of ``launch`` on ``device``; see `occupancies`.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> found = occupancy(device("a100-80"), KernelLaunch(blocks=1024, threads_per_block=256, registers_per_thread=64))
    >>> found.blocks_per_sm, found.occupancy_pct, found.limiting
    (4, 50.0, ('registers',))
    """
    return occupancies(
        device,
        blocks=[launch.blocks],
        threads_per_block=[launch.threads_per_block],
        registers_per_thread=[launch.registers_per_thread],
        static_shared_bytes=[launch.static_shared_bytes],
        dynamic_shared_bytes=[launch.dynamic_shared_bytes],
        carveout_pct=carveout_pct,
    )[0]


def occupancies(
    device: Device,
    *,
    blocks: ArrayLike,
    threads_per_block: ArrayLike,
    registers_per_thread: ArrayLike,
    static_shared_bytes: ArrayLike = 0,
    dynamic_shared_bytes: ArrayLike = 0,
    carveout_pct: int | None = None,
) -> Occupancies:
    """Return the theoretical occupancy of n launches on ``device``.

    Raises `InputError` when the device is not a GPU, its compute capability is unknown, or a value is out of range.

    Parameters
    ----------
    device : Device
        A GPU.
    blocks, threads_per_block, registers_per_thread, static_shared_bytes, dynamic_shared_bytes : array-like of int, (n,)
        As in `KernelLaunch`; a scalar applies to all launches. Blocks with more than 48 KiB of shared memory are
        assumed to have opted in (``cudaFuncSetAttribute``), as every successful launch has.
    carveout_pct : int, optional
        Preferred shared memory, in percent of an SM's maximum; without effect before 7.0. By default the maximum.
    """
    sm, capability = _read_limits(device)
    columns = _to_columns(blocks, threads_per_block, registers_per_thread, static_shared_bytes, dynamic_shared_bytes)
    grid, threads, registers, static, dynamic = columns
    warps = -(-threads // WARP)
    limits = np.stack(
        [
            np.where(threads > MAX_THREADS_PER_BLOCK, 0, sm.warps // warps),
            _limit_by_registers(sm, capability, warps, registers),
            _limit_by_shared_memory(sm, capability, static + dynamic, carveout_pct),
            np.full_like(warps, sm.blocks),
        ]
    )
    held = limits.min(axis=0)
    runs = held > 0
    divisor = np.where(runs, held, 1)
    needed = np.where(runs, -(-grid // divisor), 0)
    utilization = np.minimum(100.0, 100.0 * needed / device.compute_units)
    theoretical = 100.0 * held * warps / sm.warps
    # A grid smaller than the GPU leaves SMs partly empty, which lowers the mean occupancy over all SMs.
    of_grid = 100.0 * grid * warps / (sm.warps * device.compute_units)
    return Occupancies(
        blocks_per_sm=held,
        occupancy_pct=theoretical,
        average_occupancy_pct=np.where(runs, np.minimum(theoretical, of_grid), math.nan),
        limits=limits,
        waves=np.where(runs, grid / (divisor * device.compute_units), math.nan),
        sms_needed=needed,
        sm_utilization_pct=np.where(runs, utilization, math.nan),
    )


def _read_limits(device: Device) -> tuple[SmLimits, tuple[int, int]]:
    if device.sm is None or device.compute_capability is None:
        raise InputError(f"{device.name} has no SMs, so that nothing occupies them", "name a GPU")
    major, minor = (int(part) for part in device.compute_capability.split("."))
    if not 3 <= major <= 12 or (major >= 7 and (major, minor) not in _CARVEOUTS_KIB):
        raise InputError(f"the allocation rules of compute capability {device.compute_capability} are not known")
    return device.sm, (major, minor)


def _to_columns(*values: ArrayLike) -> list[Integers]:
    columns = [np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in values]
    names = ("blocks", "threads per block", "registers per thread", "static shared bytes", "dynamic shared bytes")
    for name, column, least in zip(names, columns, (1, 1, 0, 0, 0), strict=True):
        if column.size and int(column.min()) < least:
            raise InputError(f"{name} must be at least {least} but got {int(column.min())}")
    return [np.ascontiguousarray(column) for column in np.broadcast_arrays(*columns)]


def _limit_by_registers(sm: SmLimits, capability: tuple[int, int], warps: Integers, registers: Integers) -> Integers:
    a_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    limit = _limit_by_register_partitions(sm, 2 if capability == (6, 0) else 4, warps, a_warp)
    if capability == (6, 0):
        # Blocks that do not fit other Pascal GPUs are refused on 6.0 too, although they would fit.
        limit = np.where(_limit_by_register_partitions(sm, 4, warps, a_warp) > 0, limit, 0)
    most_per_thread = 255 if capability[0] < 7 else 256
    return np.where(registers > most_per_thread, 0, np.where(a_warp == 0, _UNLIMITED, limit))


def _limit_by_register_partitions(sm: SmLimits, partitions: int, warps: Integers, a_warp: Integers) -> Integers:
    spread_evenly = a_warp * (-(-warps // partitions) * partitions)
    warps_of_a_partition = (sm.registers // partitions) // np.maximum(a_warp, 1)
    held = warps_of_a_partition * partitions // warps
    return np.where(spread_evenly > sm.max_registers_per_block, 0, held)


def _limit_by_shared_memory(
    sm: SmLimits, capability: tuple[int, int], wanted: Integers, carveout_pct: int | None
) -> Integers:
    unit, reserve = (128, _DRIVER_SHARED_BYTES) if capability[0] >= 8 else (256, 0)
    a_block = -(-(wanted + reserve) // unit) * unit
    available = _choose_carveout(sm, capability, a_block, carveout_pct)
    held = np.where(a_block == 0, _UNLIMITED, available // np.maximum(a_block, 1))
    return np.where(a_block > sm.max_shared_memory_per_block_bytes + reserve, 0, held)


def _choose_carveout(
    sm: SmLimits, capability: tuple[int, int], a_block: Integers, carveout_pct: int | None
) -> Integers:
    """Return the shared memory setting of the SM: the preferred setting, or the least larger one that holds a block."""
    if carveout_pct is None or capability[0] < 7:
        return np.full_like(a_block, sm.shared_memory_bytes)
    if not 0 <= carveout_pct <= 100:
        raise InputError(f"a carve-out must be 0 to 100 percent but got {carveout_pct}")
    settings = np.array(_CARVEOUTS_KIB[capability], dtype=np.int64) * _KIB
    preferred = settings[np.searchsorted(settings, carveout_pct * sm.shared_memory_bytes // 100)]
    enough = settings[np.minimum(np.searchsorted(settings, a_block), len(settings) - 1)]
    return np.where(a_block <= preferred, preferred, enough)
