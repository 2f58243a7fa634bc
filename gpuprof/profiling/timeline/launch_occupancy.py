"""Estimates the occupancy of recorded kernels from their launches, for timelines without counters.

torch.profiler's own estimate is not used: it is 0 for a block with more than 48 KiB of shared memory (the limit without
opt-in), as in most libraries' kernels for matrix products.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.occupancy import MAX_THREADS_PER_BLOCK, Occupancies, occupancies
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.timeline import LAUNCH, column

#: Note of runs and settings: the occupancies in use come from launches.
ESTIMATED = "occupancy is estimated from the launches (launch_occupancy_pct), capped by the grid, not counted"
_NEEDED = (*LAUNCH, "registers_per_thread")
#: A thread has 255 at most on every GPU so far (CUDA C++ Programming Guide, "Technical Specifications").
_MOST_REGISTERS = 256


def launch_occupancies(kernels: pd.DataFrame, device: Device | None) -> tuple[Occupancies | None, NDArray[np.bool_]]:
    """Return the occupancies of kernel launches, and a mask of the rows of ``kernels`` with a known occupancy.

    ``kernels``: as `gpuprof.profiling.timeline.timeline.Timeline.kernels`.

    Returns
    -------
    Occupancies or None
        Occupancies of the known rows, in order; None without known rows, or if the device's rules are unknown.
    ndarray of bool, shape (n,)
    """
    nothing = np.zeros(len(kernels), dtype=bool)
    if device is None or device.sm is None or not len(kernels):
        return None, nothing
    size = {name: pd.to_numeric(column(kernels, name), errors="coerce") for name in _NEEDED}
    mask = np.logical_and.reduce([values.notna().to_numpy() for values in size.values()])
    mask &= np.logical_and.reduce([(size[name] >= 1).to_numpy() for name in LAUNCH])
    threads = size["block_x"] * size["block_y"] * size["block_z"]
    mask &= (threads <= MAX_THREADS_PER_BLOCK).to_numpy() & (size["registers_per_thread"] < _MOST_REGISTERS).to_numpy()
    if not mask.any():
        return None, nothing
    chosen = {
        name: values.to_numpy(dtype=np.float64, na_value=0.0)[mask].astype(np.int64) for name, values in size.items()
    }
    shared = [
        pd.to_numeric(column(kernels, f"{kind}_shared_bytes"), errors="coerce").fillna(0).to_numpy(dtype=np.int64)[mask]
        for kind in ("static", "dynamic")
    ]
    try:
        occupancies_known = occupancies(
            device,
            blocks=chosen["grid_x"] * chosen["grid_y"] * chosen["grid_z"],
            threads_per_block=chosen["block_x"] * chosen["block_y"] * chosen["block_z"],
            registers_per_thread=chosen["registers_per_thread"],
            static_shared_bytes=shared[0],
            dynamic_shared_bytes=shared[1],
        )
    except InputError:  # a compute capability with unknown rules
        return None, nothing
    return occupancies_known, mask


def with_occupancy(kernels: pd.DataFrame, device: Device | None) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the kernels with ``launch_occupancy_pct`` and ``theoretical_occupancy_pct``, and a note.

    The estimate never replaces a counter: ``achieved_occupancy_pct`` stays null without a count.
    """
    estimated, mask = launch_occupancies(kernels, device)
    if estimated is None:
        return kernels, ()
    estimates, theoretical = np.full(len(kernels), np.nan), np.full(len(kernels), np.nan)
    estimates[mask] = estimated.average_occupancy_pct
    theoretical[mask] = estimated.occupancy_pct
    counters = pd.to_numeric(column(kernels, "theoretical_occupancy_pct"), errors="coerce").to_numpy(dtype=np.float64)
    result = kernels.assign(
        launch_occupancy_pct=estimates,
        theoretical_occupancy_pct=np.where(np.isnan(counters), theoretical, counters),
    )
    lacking = int(column(kernels, "achieved_occupancy_pct").isna().sum())
    if not lacking:
        return result, ()
    return result, (ESTIMATED if lacking == len(kernels) else f"{ESTIMATED}: {lacking} of {len(kernels)} have none",)
