"""Devices with their measured rates, from the ``devices`` table of the kernel database.

Where a CPU was measured only under a share, all its cores are assumed equal: caches and arithmetic scale with the
share, and memory as in `roofline.bandwidth`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.roofline import CEILINGS, bandwidth
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.kernel_db.store import KernelDb

_RATE_COLUMN = "_flops_per_s"


def profiled_devices(db: KernelDb) -> tuple[str, ...]:
    """Return the names of the devices with measured models, the device with most measurements first."""
    counts = Counter(db.read_table("models", columns=["device"]).column("device").to_pylist())
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


def with_ceilings(device: Device, db: KernelDb | None) -> Device:
    """Return ``device`` with its measured rates in the database, if any; rates of the whole device take precedence."""
    row = _last_row(db, device.name)
    if row is None or not row.measured:
        return device
    row = _of_the_whole(row, device)
    rates = {**device.flops_per_s, **_rates(row)}
    sources = {**device.sources, CEILINGS: row.source or f"measured in run {row.run_id}"}
    return replace(
        device,
        flops_per_s=MappingProxyType(rates),
        dram_bytes_per_s=row.dram_bytes_per_s or device.dram_bytes_per_s,
        reread_bytes_per_s=_reread(row) or device.reread_bytes_per_s,
        sources=MappingProxyType(sources),
    )


def recorded_device(name: str, db: KernelDb) -> Device | None:
    """Return a device from the database alone (the CPU of another machine), None if missing or incomplete."""
    row = _last_row(db, name)
    if row is None or not _rates(row):
        return None
    if row.compute_units is None or row.dram_bytes is None or row.dram_bytes_per_s is None:
        return None
    device = Device(
        name=name,
        kind="gpu" if row.kind == "gpu" else "cpu",
        compute_units=row.compute_units,
        clock_mhz=row.clock_mhz or 0.0,
        flops_per_s=MappingProxyType(_rates(row)),
        dram_bytes=row.dram_bytes,
        dram_bytes_per_s=row.dram_bytes_per_s,
        l2_bytes=row.l2_bytes or 0,
        compute_capability=row.compute_capability,
        max_power_w=row.max_power_w,
        sources=MappingProxyType({"all": f"the kernel database, run {row.run_id}"}),
    )
    return with_ceilings(device, db)


def _last_row(db: KernelDb | None, name: str) -> DeviceRow | None:
    """Return the last row; rows with measured rates take precedence, and for a CPU rows of larger shares."""
    if db is None:
        return None
    rows = read_records(db, DeviceRow, {"device": name})
    rows = [row for row in rows if Share(row.sm_share_pct).is_whole or (row.kind == "cpu" and row.measured)]
    telling = [row for row in rows if row.dram_bytes_per_s or _rates(row)]  # some rows hold the link to the host only
    return max(telling, key=lambda row: (bool(row.measured), row.sm_share_pct, row.run_id), default=None)


def _of_the_whole(row: DeviceRow, device: Device) -> DeviceRow:
    """Return a row with rates of the whole device, scaled from those of the row's share."""
    share = Share(row.sm_share_pct)
    if share.is_whole:
        return row
    cores, memory = device.fraction(share), bandwidth(device, share) / device.dram_bytes_per_s
    whole: dict[str, Any] = {name: value / cores for name, value in _rate_columns(row)}
    if row.dram_bytes_per_s:
        whole["dram_bytes_per_s"] = row.dram_bytes_per_s / memory
    cached = [(size, rate / (cores if size <= device.l2_bytes else memory)) for size, rate in _reread(row)]
    source = f"{row.source or 'measured'}; under {row.sm_share_pct:g}% of the device, scaled to all of it"
    return replace(row, **whole, reread_bytes_per_s=json.dumps(cached), source=source)


def _reread(row: DeviceRow) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), float(rate)) for size, rate in json.loads(row.reread_bytes_per_s or "[]"))


def _rates(row: DeviceRow) -> dict[str, float]:
    return {name.removesuffix(_RATE_COLUMN): float(value) for name, value in _rate_columns(row)}


def _rate_columns(row: DeviceRow) -> Iterator[tuple[str, float]]:
    for column in fields(row):
        if column.name.endswith(_RATE_COLUMN) and (value := getattr(row, column.name)):
            yield column.name, value
