"""Published launches as what is learned from them: how many warps an SM holds, and how far a grid fills the GPU."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.published_ops import OP_FAMILIES, MeasuredOps, neusight_launches, neusight_ops
from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.occupancy import occupancies
from gpuprof.estimators.cross_gpu.features import Array

#: Families whose kernels are cuBLAS's and cuDNN's: registers and shared memory stand in the libraries.
LIBRARY_FAMILIES = ("linear", "bmm", "conv")
#: PyTorch's own kernels have no registers in the data. Element-wise ones and those of rows use so few that warps or
#: blocks limit them.
_FEW_REGISTERS = 32


@dataclass(frozen=True, slots=True)
class Launches:
    """Published launches of one family."""

    measured: MeasuredOps  #: The N ops.
    warps: Array  #: Shape (N,). Warps that an SM at work holds: of as many blocks as fit, or of those that there are.
    waves: Array  #: Shape (N,). Blocks in units of what the whole GPU holds at once.
    held: Array  #: Shape (N,). Warps of as many blocks as fit on an SM.

    def take(self, rows: Any) -> Launches:
        """Return the rows at positions, or where a mask is true."""
        return Launches(self.measured.take(rows), self.warps[rows], self.waves[rows], self.held[rows])


@cache
def kernel_resources() -> Mapping[tuple[str, str], tuple[int, int]]:
    """Return (compute capability, kernel) → registers of a thread, static shared memory of a block in bytes.

    As ``cuobjdump --dump-resource-usage`` prints them of cuBLAS 12.1.3 and cuDNN 8.9.2, which the data was measured
    with, for the kernels that occur in it.
    """
    text = (datasets() / "creq" / "kernel_resources.csv").read_text(encoding="utf-8")
    return {
        (row["compute_capability"], row["kernel"]): (int(row["registers_per_thread"]), int(row["static_shared_bytes"]))
        for row in csv.DictReader(text.splitlines())
    }


def published_launches() -> list[Launches]:
    """Return the launches of NeuSight's ops of which all resources are known, a family each."""
    return [_launches_of(family) for family in OP_FAMILIES]


def _launches_of(family: str) -> Launches:
    measured, launched = neusight_ops(family), neusight_launches(family)
    registers, shared = _resources(family, measured, launched.kernel)
    is_launch = (registers > 0) & (launched.blocks > 0) & (launched.threads > 0)
    count = len(is_launch)
    warps, waves, held = np.zeros(count), np.zeros(count), np.zeros(count)
    for name in np.unique(measured.device).tolist():
        rows = np.flatnonzero(is_launch & (measured.device == name))
        gpu = device(name)
        occupancy = occupancies(
            gpu,
            blocks=launched.blocks[rows],
            threads_per_block=launched.threads[rows],
            registers_per_thread=registers[rows],
            static_shared_bytes=shared[rows],
        )
        of_block = np.ceil(launched.threads[rows] / 32.0)
        held[rows] = occupancy.blocks_per_sm * of_block
        there = np.maximum(1.0, launched.blocks[rows] / gpu.compute_units)
        warps[rows] = np.minimum(occupancy.blocks_per_sm, there) * of_block
        waves[rows] = launched.blocks[rows] / np.maximum(1, occupancy.blocks_per_sm) / gpu.compute_units
    runs = is_launch & (held > 0)
    return Launches(measured, warps, waves, held).take(runs)


def _resources(family: str, measured: MeasuredOps, kernel: NDArray[np.str_]) -> tuple[NDArray[np.int64], ...]:
    if family not in LIBRARY_FAMILIES:
        return np.full(len(kernel), _FEW_REGISTERS), np.zeros(len(kernel), dtype=np.int64)
    resources = kernel_resources()
    capability = {name: device(name).compute_capability or "" for name in np.unique(measured.device).tolist()}
    pairs = [
        resources.get((capability[name], kernel_name), (0, 0))
        for name, kernel_name in zip(measured.device, kernel, strict=True)
    ]
    launched = np.array(pairs, dtype=np.int64)
    return launched[:, 0], launched[:, 1]
