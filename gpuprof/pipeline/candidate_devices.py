"""Candidate devices of a plan: named, read from a file, or all devices with a price."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import FleetArgument

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.domain.fleet import Fleet
    from gpuprof.estimators.cross_gpu.execution import Execution
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.pipeline.planning_options import PlanningOptions
    from gpuprof.pipeline.result import NoteCallback


def find_fleet(
    given: FleetArgument | None, database: KernelDb | None, planning: PlanningOptions, note: NoteCallback
) -> Fleet:
    """Return the devices that a plan may use; ``"any"`` excludes devices without the requested precision.

    Raises `InputError` when a name or a file is wrong.
    """
    from gpuprof.domain.fleet import ANY, Fleet, FleetEntry, parse_fleet, read_fleet
    from gpuprof.estimators.cross_gpu.learned_range import describe_distance
    from gpuprof.pipeline.devices import read_own_devices, resolve_device

    own_devices = read_own_devices(planning.device_file)

    def find(name: str | None) -> Device:
        return resolve_device(name, database, own_devices, note)

    if isinstance(given, Fleet):
        fleet = given
    elif given is None:
        profiled = find(None)
        fleet = Fleet((FleetEntry(profiled, 1 if profiled.kind == "cpu" else None),))  # this machine, once
    elif isinstance(given, os.PathLike) or given.endswith(".toml"):
        fleet = read_fleet(Path(given), find)
    else:
        words = {item.strip().lower() for item in given.split(",")}
        fleet = parse_fleet(given, find, _priced_devices(find, own_devices, planning, note) if ANY in words else ())
    _note_unpriced(fleet, note)
    for device in (entry.device for entry in fleet.entries if entry.device.name in own_devices):
        if told := describe_distance(device, "float32"):
            note(told)
    return fleet


def require_precision(fleet: Fleet, execution: Execution, is_measured: Callable[[str], bool]) -> None:
    """Refuse GPUs that lack the requested precision of unmeasured models.

    Raises `InputError` for the first such GPU.
    """
    for entry in fleet.entries:
        device = entry.device
        if device.kind == "gpu" and not execution.is_possible(device) and not is_measured(device.name):
            known = ", ".join(execution.possible_precisions(device))
            raise InputError(
                f"{device.name} has no {execution.precision} arithmetic", f"leave it out, or choose one of {known}"
            )


def _priced_devices(
    find: Callable[[str | None], Device],
    own_devices: Mapping[str, Device],
    planning: PlanningOptions,
    note: NoteCallback,
) -> list[Device]:
    from gpuprof.domain.catalogue import devices

    names = [name for name, one in {**devices(), **own_devices}.items() if one.price_per_hour is not None]
    priced = [find(name) for name in names]
    execution = planning.execution()
    lacking = [one.name for one in priced if not execution.is_possible(one)]
    if lacking:
        note(f"left out, without {execution.precision} arithmetic: {', '.join(lacking)}")
    return [one for one in priced if one.name not in lacking]


def _note_unpriced(fleet: Fleet, note: NoteCallback) -> None:
    """Note devices without a price, which are planned at 1 $/h, in a fleet with prices."""
    unpriced = [entry.device.name for entry in fleet.entries if entry.device.price_per_hour is None]
    if unpriced and len(unpriced) < len(fleet.entries):
        note(f"without a price, counted as 1 $/h: {', '.join(unpriced)}; a fleet.toml can give one")
