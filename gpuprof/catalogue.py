"""Reads the devices and published measurements that ship with gpuprof."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from gpuprof.device import Device, MigProfile, SmLimits
from gpuprof.errors import unknown_name


def datasets() -> Traversable:
    """Return the directory of the data that ships with gpuprof."""
    return files("gpuprof") / "datasets"


@cache
def devices() -> Mapping[str, Device]:
    """Return every device of ``datasets/devices.toml`` by name."""
    with (datasets() / "devices.toml").open("rb") as file:
        content = tomllib.load(file)
    return MappingProxyType({name: _device(name, table) for name, table in content.items()})


def device(name: str) -> Device:
    """Return the device called ``name``, in any case.

    Raises
    ------
    InputError
        With the nearest known names.
    """
    known = devices()
    found = known.get(name.lower())
    if found is None:
        raise unknown_name("device", name, sorted(known))
    return found


def _device(name: str, table: dict[str, Any]) -> Device:
    table = dict(table)
    limits = table.pop("sm")
    profiles = table.pop("mig_profiles", [])
    return Device(
        name=name,
        kind="gpu",
        sm=SmLimits(**limits),
        mig_profiles=tuple(
            MigProfile(**{**profile, "start_slots": tuple(profile["start_slots"])}) for profile in profiles
        ),
        flops_per_s=MappingProxyType(table.pop("flops_per_s")),
        sources=MappingProxyType(table.pop("sources", {})),
        **table,
    )
