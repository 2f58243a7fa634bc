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
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuprof.domain.device import Device, SmLimits
from gpuprof.errors import InputError

#: Factors limiting the blocks of an SM, in the order of the rows of `Occupancies.limits`.
FACTORS = ("warps", "registers", "shared_memory", "blocks")

#: Allocation unit of a warp's registers, for every compute capability here.
_REGISTER_UNIT = 256
#: Shared memory reserved per block by the driver from 8.0 on.
_DRIVER_SHARED_BYTES = 1024
#: Value of a limit without effect.
_UNLIMITED = np.iinfo(np.int32).max
#: Major compute capabilities whose allocation rules are implemented.
_CAPABILITIES = frozenset({3, 5, 6, 7, 8, 9, 10, 12})

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
class Occupancies:
    """Theoretical occupancy of n launches on a GPU, in arrays of shape (n,)."""

    blocks_per_sm: Integers  #: Resident blocks per SM; 0 when the launch cannot run.
    occupancy_pct: Floats  #: Warps of the resident blocks in percent of the SM's maximum.
    limits: Integers  #: Blocks per SM under each of `FACTORS` alone, of shape (4, n).
    #: SMs needed for all blocks at once (thesis §5.3.2, ``num_sms_needed``) in percent of the GPU's SMs, at most 100;
    #: NaN when the launch cannot run.
    sm_utilization_pct: Floats
    #: Highest achievable mean over all SMs: ``occupancy_pct``, or less where the grid has too few warps to fill the
    #: SMs; NaN when the launch cannot run.
    average_occupancy_pct: Floats


def occupancies(
    device: Device,
    *,
    blocks: ArrayLike,
    threads_per_block: ArrayLike,
    registers_per_thread: ArrayLike,
    static_shared_bytes: ArrayLike = 0,
    dynamic_shared_bytes: ArrayLike = 0,
) -> Occupancies:
    """Return the theoretical occupancy of n launches on ``device``, with the largest carve-out for shared memory.

    Raises `InputError` when the device is not a GPU, its compute capability is unknown, or a value is out of range.

    Parameters
    ----------
    device : Device
        A GPU.
    blocks, threads_per_block, registers_per_thread, static_shared_bytes, dynamic_shared_bytes : array-like of int, (n,)
        Blocks of the grid, and what a block or thread takes, shared memory without the driver's part; a scalar applies
        to all launches. Blocks with more than 48 KiB of shared memory are assumed to have opted in
        (``cudaFuncSetAttribute``), as every successful launch has.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> found = occupancies(device("a100-80"), blocks=[1024], threads_per_block=[256], registers_per_thread=[64])
    >>> found.blocks_per_sm.tolist(), found.occupancy_pct.tolist()
    ([4], [50.0])
    """
    sm, capability = _read_limits(device)
    columns = _to_columns(blocks, threads_per_block, registers_per_thread, static_shared_bytes, dynamic_shared_bytes)
    grid, threads, registers, static, dynamic = columns
    warps = -(-threads * sm.warps // sm.threads)
    limits = np.stack(
        [
            np.where(threads > sm.max_threads_per_block, 0, sm.warps // warps),
            _limit_by_registers(sm, capability, warps, registers),
            _limit_by_shared_memory(sm, capability, static + dynamic),
            np.full_like(warps, sm.blocks),
        ]
    )
    blocks_per_sm = limits.min(axis=0)
    runs = blocks_per_sm > 0
    divisor = np.where(runs, blocks_per_sm, 1)
    waves = np.where(runs, -(-grid // divisor), 0)
    utilization = np.minimum(100.0, 100.0 * waves / device.compute_units)
    theoretical = 100.0 * blocks_per_sm * warps / sm.warps
    # A grid smaller than the GPU leaves SMs partly empty, which lowers the mean occupancy over all SMs.
    of_grid = 100.0 * grid * warps / (sm.warps * device.compute_units)
    return Occupancies(
        blocks_per_sm=blocks_per_sm,
        occupancy_pct=theoretical,
        average_occupancy_pct=np.where(runs, np.minimum(theoretical, of_grid), math.nan),
        limits=limits,
        sm_utilization_pct=np.where(runs, utilization, math.nan),
    )


def _read_limits(device: Device) -> tuple[SmLimits, tuple[int, int]]:
    if device.sm is None or device.compute_capability is None:
        raise InputError(f"{device.name} has no SMs, so that nothing occupies them", "name a GPU")
    major, minor = (int(part) for part in device.compute_capability.split("."))
    if major not in _CAPABILITIES:
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
    a_warp = -(-registers * (sm.threads // sm.warps) // _REGISTER_UNIT) * _REGISTER_UNIT
    limit = _limit_by_register_partitions(sm, 2 if capability == (6, 0) else 4, warps, a_warp)
    if capability == (6, 0):
        # Blocks that do not fit other Pascal GPUs are refused on 6.0 too, although they would fit.
        limit = np.where(_limit_by_register_partitions(sm, 4, warps, a_warp) > 0, limit, 0)
    most_per_thread = 255 if capability[0] < 7 else 256
    return np.where(registers > most_per_thread, 0, np.where(a_warp == 0, _UNLIMITED, limit))


def _limit_by_register_partitions(sm: SmLimits, partitions: int, warps: Integers, a_warp: Integers) -> Integers:
    spread_evenly = a_warp * (-(-warps // partitions) * partitions)
    warps_of_a_partition = (sm.registers // partitions) // np.maximum(a_warp, 1)
    blocks = warps_of_a_partition * partitions // warps
    return np.where(spread_evenly > sm.max_registers_per_block, 0, blocks)


def _limit_by_shared_memory(sm: SmLimits, capability: tuple[int, int], shared_bytes: Integers) -> Integers:
    unit, reserve = (128, _DRIVER_SHARED_BYTES) if capability[0] >= 8 else (256, 0)
    a_block = -(-(shared_bytes + reserve) // unit) * unit
    blocks = np.where(a_block == 0, _UNLIMITED, sm.shared_memory_bytes // np.maximum(a_block, 1))
    return np.where(a_block > sm.max_shared_memory_per_block_bytes + reserve, 0, blocks)
