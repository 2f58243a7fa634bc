"""Kernels of ops with their times, from the table ``kernels`` of the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, prod
from statistics import median

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.occupancy import occupancies
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.learned.features import feature_matrix, roofline_ns
from gpuprof.estimators.learned.op_facts import OpCostRow, OpFacts, facts_of_row
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.store import KernelDb


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Columns of the table ``kernels``: a single execution of a kernel of an op."""

    run_id: str
    repeat: int
    position: int
    op_signature: str | None
    op_name: str | None
    name: str
    duration_ns: int | None
    achieved_occupancy_pct: float | None
    launch_occupancy_pct: float | None
    theoretical_occupancy_pct: float | None
    grid_x: int | None
    grid_y: int | None
    grid_z: int | None
    block_x: int | None
    block_y: int | None
    block_z: int | None
    registers_per_thread: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    runtime: str | None
    execution: str | None
    precision: str | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of an op."""

    name: str
    duration_ns: float  #: Median over its executions.
    occupancy_pct: float | None = None  #: Measured, else estimated from the launch, else theoretical.
    #: SMs needed by the blocks at once, in percent of all, by the launch as in `profile` (thesis section 5.3.2). Unlike
    #: the activity counted by ncu, it does not fall with the tail of a kernel.
    sm_util_pct: float | None = None


class KernelTable:
    """Kernels by op; for an unseen op, those of the nearest op of its type.

    ``kernels``: op's signature → its kernels, in launch order; ``facts``: op's signature → the op.
    """

    def __init__(self, device: Device, kernels: Mapping[str, Sequence[Kernel]], facts: Mapping[str, OpFacts]) -> None:
        self._device = device
        self._kernels = kernels
        by_type: dict[str, list[str]] = {}
        for signature in sorted(kernels):
            if signature in facts:
                by_type.setdefault(facts[signature].op_type, []).append(signature)
        self._by_type = by_type
        self._features = {
            op_type: feature_matrix([facts[s] for s in group], device, Share()) for op_type, group in by_type.items()
        }
        self._least = {
            s: float(roofline_ns([facts[s]], device, Share())[0]) for group in by_type.values() for s in group
        }

    def __len__(self) -> int:
        """Return the number of ops with kernels."""
        return len(self._kernels)

    def kernels_of(self, signature: str, op: OpFacts) -> tuple[Kernel, ...] | None:
        """Return the kernels of an op; None where no op of its type was seen.

        Kernels of the nearest op are scaled in time by the ratio of both ops' roofline times.
        """
        if signature in self._kernels:
            return tuple(self._kernels[signature])
        signatures = self._by_type.get(op.op_type)
        if not signatures:
            return None
        distance = np.abs(self._features[op.op_type] - feature_matrix([op], self._device, Share())).sum(axis=1)
        nearest = signatures[int(distance.argmin())]
        least = float(roofline_ns([op], self._device, Share())[0])
        # In nanoseconds: the 1 avoids a division by zero for ops without traffic, whose least time is 0.
        scale = (least + 1.0) / (self._least[nearest] + 1.0)
        return tuple(
            Kernel(kernel.name, kernel.duration_ns * scale, kernel.occupancy_pct, kernel.sm_util_pct)
            for kernel in self._kernels[nearest]
        )


def read_kernel_table(db: KernelDb, device: Device) -> KernelTable:
    """Return the kernels measured on the whole of ``device``."""
    where = {"device": device.name, "sm_share_pct": 100.0, "mig_profile": None}
    ops = read_records(db, OpCostRow, where, table="ops")
    facts = {row.signature: facts_of_row(row) for row in ops}
    groups: dict[str, dict[tuple[str, int, str | None], list[KernelTime]]] = {}
    for row in comparable_rows(read_records(db, KernelTime, where, table="kernels")):
        if row.op_signature is not None and row.duration_ns is not None:
            execution = (row.run_id, row.repeat, row.op_name)
            groups.setdefault(row.op_signature, {}).setdefault(execution, []).append(row)
    typical = {signature: _typical(list(executions.values()), device) for signature, executions in groups.items()}
    return KernelTable(device, typical, facts)


def _typical(executions: Sequence[Sequence[KernelTime]], device: Device) -> tuple[Kernel, ...]:
    """Return the kernels of executions with the typical number of launches, as medians over them."""
    ordered = [sorted(rows, key=lambda row: row.position) for rows in executions]
    count = int(median(len(rows) for rows in ordered))
    same = [rows for rows in ordered if len(rows) == count] or ordered[:1]
    return tuple(
        Kernel(
            place[0].name,
            float(median(row.duration_ns or 0 for row in place)),
            _median([row.achieved_occupancy_pct for row in place])
            or _median([row.launch_occupancy_pct for row in place])
            or _median([row.theoretical_occupancy_pct for row in place]),
            _median([_compute_utilization(device, row) for row in place]),
        )
        for place in zip(*same, strict=True)
    )


def _compute_utilization(device: Device, row: KernelTime) -> float | None:
    """Return the SMs needed by a launch, in percent; None where the launch or the device's rules are unknown."""
    grid, block = (row.grid_x, row.grid_y, row.grid_z), (row.block_x, row.block_y, row.block_z)
    sizes = [size for size in (*grid, *block) if size is not None and size >= 1]
    if device.sm is None or len(sizes) < len(grid) + len(block) or row.registers_per_thread is None:
        return None
    try:
        launch = occupancies(
            device,
            blocks=prod(sizes[:3]),
            threads_per_block=prod(sizes[3:]),
            registers_per_thread=row.registers_per_thread,
            static_shared_bytes=row.static_shared_bytes or 0,
            dynamic_shared_bytes=row.dynamic_shared_bytes or 0,
        )
    except InputError:
        return None
    (sm_utilization_pct,) = launch.sm_utilization_pct.tolist()
    return None if isnan(sm_utilization_pct) else sm_utilization_pct


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(median(numbers)) if numbers else None
