"""Devices with the rates that were measured on them, from the ``devices`` table of the kernel database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gpuprof.device import Device
from gpuprof.estimators.roofline.roofline import CEILINGS
from gpuprof.kernel_db.store import KernelDb

_RATE_COLUMN = "_flops_per_s"


def profiled_devices(db: KernelDb) -> tuple[str, ...]:
    """Return the names of the devices that models were measured on, the one with most measurements first."""
    counts = Counter(db.read("models", columns=["device"]).column("device").to_pylist())
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


def with_ceilings(device: Device, db: KernelDb | None) -> Device:
    """Return ``device`` with the rates that the database has measured of the whole of it, if it has."""
    row = _last_row(db, device.name)
    if row is None or not row["measured"]:
        return device
    rates = {**device.flops_per_s, **_rates(row)}
    sources = {**device.sources, CEILINGS: row["source"] or f"measured in run {row['run_id']}"}
    return replace(
        device,
        flops_per_s=MappingProxyType(rates),
        dram_bytes_per_s=row["dram_bytes_per_s"] or device.dram_bytes_per_s,
        sources=MappingProxyType(sources),
    )


def recorded_device(name: str, db: KernelDb) -> Device | None:
    """Return a device that only the database knows (the CPU of another machine), None if it does not or not enough."""
    row = _last_row(db, name)
    if row is None or not _rates(row) or None in (row["compute_units"], row["dram_bytes"], row["dram_bytes_per_s"]):
        return None
    device = Device(
        name=name,
        kind="gpu" if row["kind"] == "gpu" else "cpu",
        compute_units=row["compute_units"],
        clock_mhz=row["clock_mhz"] or 0.0,
        flops_per_s=MappingProxyType(_rates(row)),
        dram_bytes=row["dram_bytes"],
        dram_bytes_per_s=row["dram_bytes_per_s"],
        l2_bytes=row["l2_bytes"] or 0,
        compute_capability=row["compute_capability"],
        max_power_w=row["max_power_w"],
        sources=MappingProxyType({"all": f"the kernel database, run {row['run_id']}"}),
    )
    return with_ceilings(device, db)


def _last_row(db: KernelDb | None, name: str) -> Mapping[str, Any] | None:
    """Return the last row of the whole device, one with measured rates before any without."""
    if db is None:
        return None
    rows: list[dict[str, Any]] = db.read("devices", where={"device": name, "sm_share_pct": 100.0}).to_pylist()
    telling = [row for row in rows if row["dram_bytes_per_s"] or _rates(row)]  # some know the link to the host only
    return max(telling, key=lambda row: (bool(row["measured"]), row["run_id"]), default=None)


def _rates(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removesuffix(_RATE_COLUMN): float(value)
        for name, value in row.items()
        if name.endswith(_RATE_COLUMN) and value
    }
