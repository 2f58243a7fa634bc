"""Reads the devices and published measurements that ship with gpuprof."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from gpuprof.domain.device import Device, MigProfile, SmLimits
from gpuprof.errors import unknown_name

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PublishedProfile:
    """Published measurements of a model at one batch size, alone on a device; None where unknown."""

    model: str
    batch: int
    latency_ms: float | None  #: Of one batch.
    throughput_rps: float | None  #: Requests a second.
    memory_pct: float | None  #: Memory held, percent of the device's.
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: The three Creq metrics: the most of
    #: overlapping kernels, its time-weighted average (WAO), and the time-weighted SM utilisation (WSM).
    max_occupancy_pct: float | None
    wavg_occupancy_pct: float | None
    wavg_sm_util_pct: float | None


@dataclass(frozen=True, slots=True)
class PublishedProfiles:
    """A published table of profiles."""

    device: str  #: Name in the catalogue.
    #: ``runtime``, ``source``: What the models ran in, and where the figures stand.
    runtime: str
    source: str
    rows: tuple[PublishedProfile, ...]


def datasets() -> Traversable:
    """Return the directory of the data that ships with gpuprof."""
    return files("gpuprof") / "datasets"


@cache
def devices() -> Mapping[str, Device]:
    """Return every device of ``datasets/devices.toml`` by name."""
    return MappingProxyType({name: make_device(name, table) for name, table in _read_tables().items()})


def device(name: str) -> Device:
    """Return the device called ``name``, whatever its case. Raises `InputError` with the nearest known names."""
    known = devices()
    entry = known.get(name.lower())
    if entry is None:
        raise unknown_name("device", name, sorted(known))
    return entry


def device_of_driver(driver_name: str) -> Device | None:
    """Return the device that the driver calls ``driver_name`` (``"NVIDIA A100-SXM4-80GB"``), None if none is it."""
    for name, table in _read_tables().items():
        if driver_name in table["driver_names"]:
            return devices()[name]
    return None


@cache
def _read_tables() -> dict[str, dict[str, Any]]:
    with (datasets() / "devices.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def v100_profiles() -> PublishedProfiles:
    """Return the profiles of 13 models on a V100 that Elvinger's thesis publishes (2024, tables 5.2, 6.5 and A.1)."""
    with (datasets() / "v100_profiles.toml").open("rb") as file:
        origin = tomllib.load(file)
    with (datasets() / "v100_profiles.csv").open(encoding="utf-8") as file:
        rows = tuple(_parse_profile(row) for row in csv.DictReader(file))
    source = f"{origin['author']}, {origin['publication']}, tables {', '.join(origin['tables'])}, {origin['link']}"
    return PublishedProfiles(origin["device"], origin["runtime"], source, rows)


def _parse_profile(row: dict[str, str]) -> PublishedProfile:
    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    latency_s = number("latency_s")
    return PublishedProfile(
        model=row["model"],
        batch=int(row["batch"]),
        latency_ms=None if latency_s is None else round(latency_s * 1000.0, 6),  # the digits that were published
        throughput_rps=number("throughput_rps"),
        memory_pct=number("mem_capacity_pct"),
        max_occupancy_pct=number("achieved_occupancy_pct"),
        wavg_occupancy_pct=number("weighted_achieved_occupancy_pct"),
        wavg_sm_util_pct=number("weighted_sm_utilization_pct"),
    )


def driver_names_by_device() -> Mapping[str, Sequence[str]]:
    """Return the names under which drivers report each device of the catalogue."""
    return MappingProxyType({name: tuple(table["driver_names"]) for name, table in _read_tables().items()})


def make_device(name: str, table: Mapping[str, Any]) -> Device:
    """Return the device that a table like those of ``devices.toml`` describes."""
    # The file has the units of datasheets; here is the border where they become the package's.
    return Device(
        name=name,
        kind="gpu",
        compute_units=table["compute_units"],
        clock_mhz=float(table["clock_mhz"]),
        flops_per_s=MappingProxyType({dtype: float(round(rate * 1e12)) for dtype, rate in table["tflops"].items()}),
        dram_bytes=int(table["dram_mib"] * _MIB),
        dram_bytes_per_s=table["dram_gb_per_s"] * 1e9,
        l2_bytes=int(table["l2_mib"] * _MIB),
        compute_capability=table["compute_capability"],
        sm=SmLimits(**table["sm"]),
        max_power_w=None if (power := table.get("max_power_w")) is None else float(power),
        price_per_hour=table.get("price_per_hour"),
        mig_slices=table.get("mig_slices", 0),
        mig_profiles=tuple(_read_mig_profile(profile) for profile in table.get("mig_profiles", ())),
        dram_type=table.get("dram_type"),
        process_nm=table.get("process_nm"),
        sources=MappingProxyType({"name": table.get("full_name", name), **table.get("sources", {})}),
    )


def _read_mig_profile(table: Mapping[str, Any]) -> MigProfile:
    rest = {key: value for key, value in table.items() if key not in {"memory_mib", "start_slots"}}
    return MigProfile(**rest, memory_bytes=table["memory_mib"] * _MIB, start_slots=tuple(table["start_slots"]))
