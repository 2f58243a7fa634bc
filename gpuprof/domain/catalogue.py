"""Reads the catalogue of devices shipped with gpuprof."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from gpuprof.domain.device import Device, MigProfile, SmLimits
from gpuprof.errors import unknown_name

_MIB = 2**20


def datasets() -> Traversable:
    """Return the directory of the data shipped with gpuprof."""
    return files("gpuprof") / "datasets"


@cache
def devices() -> Mapping[str, Device]:
    """Return every device of ``datasets/devices.toml`` by name."""
    return MappingProxyType({name: make_device(name, table) for name, table in _read_tables().items()})


def device(name: str) -> Device:
    """Return the device called ``name``, ignoring case. Raises `InputError` with the nearest names in the catalogue.

    Examples
    --------
    >>> device("A100-80").name, device("A100-80").compute_units
    ('a100-80', 108)
    """
    catalogued = devices()
    entry = catalogued.get(name.lower())
    if entry is None:
        raise unknown_name("device", name, sorted(catalogued))
    return entry


def device_of_driver(driver_name: str) -> Device | None:
    """Return the device with the driver's name ``driver_name`` (``"NVIDIA A100-SXM4-80GB"``), None if there is none.

    Examples
    --------
    >>> device_of_driver("NVIDIA H100 80GB HBM3").name
    'h100'
    >>> device_of_driver("Voodoo 2") is None
    True
    """
    for name, table in _read_tables().items():
        if driver_name in table["driver_names"]:
            return devices()[name]
    return None


@cache
def _read_tables() -> dict[str, dict[str, Any]]:
    with (datasets() / "devices.toml").open("rb") as file:
        return tomllib.load(file)


def driver_names_by_device() -> Mapping[str, Sequence[str]]:
    """Return the names under which drivers report each device of the catalogue."""
    return MappingProxyType({name: tuple(table["driver_names"]) for name, table in _read_tables().items()})


def make_device(name: str, table: Mapping[str, Any]) -> Device:
    """Return the device described by a table in the format of ``devices.toml``."""
    # Converts the units of datasheets, as in the file, to the units of the package.
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
    values = {key: value for key, value in table.items() if key not in {"memory_mib", "start_slots"}}
    return MigProfile(**values, memory_bytes=table["memory_mib"] * _MIB, start_slots=tuple(table["start_slots"]))
