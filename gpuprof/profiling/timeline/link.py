"""Bandwidth of the link between host and GPU, from the copies in a timeline.

iGniter (section 3.1) divides a model's inputs and outputs by the bandwidth of PCIe. A copy of a few kilobytes is mostly
overhead and says nothing about bandwidth; copies of the same size from pinned and from pageable memory differ
by a factor, so the rate is stored with its kind of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gpuprof.domain.device import Device
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.profiling.timeline.timeline import D2H, H2D, column

#: Smallest copy evaluated: at 64 GB/s it takes 16 µs, some ten times the setup of a copy.
LEAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Rate of copies in a direction, from or to a kind of host memory."""

    direction: str  #: ``"h2d"`` or ``"d2h"``.
    memory: str | None  #: ``"pinned"``, ``"pageable"``, or None if not reported.
    bytes_per_s: float  #: All their bytes by all their time.
    copies: int


def link_rates(copies: pd.DataFrame | None) -> tuple[LinkRate, ...]:
    """Return the rate for each direction and kind of memory with large enough copies.

    ``copies``: as `gpuprof.profiling.timeline.timeline.Timeline.copies`; None: not recorded.
    """
    if copies is None or not len(copies):
        return ()
    # A migration of unified memory moves pages on demand: its rate is not that of a copy.
    counts = copies["direction"].isin([H2D, D2H]) & (column(copies, "memory") != "unified")
    telling = copies[counts & (copies["bytes"] >= LEAST_BYTES) & (copies["duration_ns"] > 0)]
    memory = column(telling, "memory").astype("object")
    parts = telling.assign(memory=memory.where(memory.notna(), None)).groupby(["direction", "memory"], dropna=False)
    return tuple(
        LinkRate(
            str(direction),
            memory if isinstance(memory, str) else None,
            float(np.sum(part["bytes"])) / float(np.sum(part["duration_ns"])) * 1e9,
            len(part),
        )
        for (direction, memory), part in parts
    )


def link_row(run_id: str, device: Device, copies: pd.DataFrame | None, tool: str) -> DeviceRow | None:
    """Return the row of ``devices`` with the link's rates; None without a large enough copy.

    Of several kinds of memory, the kind with the most copies is used: it is typical of the models on this device.
    """
    rates = link_rates(copies)
    to_device, to_host = _typical_rate(rates, H2D), _typical_rate(rates, D2H)
    links = [rate for rate in (to_device, to_host) if rate is not None]
    if not links:
        return None
    directions = ", ".join(f"{r.copies} copies {r.direction} of {r.memory or 'unknown'} memory" for r in links)
    return DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        compute_capability=device.compute_capability,
        pcie_bytes_per_s=None if to_device is None else to_device.bytes_per_s,
        pcie_d2h_bytes_per_s=None if to_host is None else to_host.bytes_per_s,
        pcie_memory=links[0].memory,
        measured=True,
        source=f"measured: {directions}, each of {LEAST_BYTES >> 20} MiB or more, in a timeline by {tool}",
    )


def _typical_rate(rates: tuple[LinkRate, ...], direction: str) -> LinkRate | None:
    return max((rate for rate in rates if rate.direction == direction), key=lambda link: link.copies, default=None)
