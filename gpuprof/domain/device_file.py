"""Reads GPUs missing from the catalogue from a user's file in the format of ``datasets/devices.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuprof.domain.catalogue import devices, make_device
from gpuprof.domain.device import Device, SmLimits
from gpuprof.domain.file_access import read_input
from gpuprof.errors import InputError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
_RATES = frozenset({"float64", "float32", "tfloat32", "float16", "bfloat16", "int8", "float8", "float4"})


class _Table(BaseModel):
    """Keys of a GPU; units as in the catalogue."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _SmTable(_Table):
    threads: _Count
    warps: _Count
    blocks: _Count
    registers: _Count
    shared_memory_bytes: _Count
    max_registers_per_thread: _Count = 255
    max_registers_per_block: _Count = 65536
    max_shared_memory_per_block_bytes: _Count = 49152


class _MigTable(_Table):
    name: Annotated[str, Field(pattern=r"^\d+g\.\d+gb$")]
    sms: _Count
    memory_mib: _Positive
    memory_slices: _Count
    compute_slices: _Count
    start_slots: tuple[Annotated[int, Field(ge=0, lt=16)], ...]
    max_count: _Count


class _DeviceTable(_Table):
    compute_units: _Count
    clock_mhz: _Positive
    dram_mib: _Positive
    dram_gb_per_s: _Positive
    l2_mib: _Positive
    tflops: dict[str, _Positive]
    full_name: str | None = None
    driver_names: tuple[str, ...] = ()
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    process_nm: _Positive | None = None
    max_power_w: _Positive | None = None
    price_per_hour: _Positive | None = None
    dram_type: str | None = None
    sm: _SmTable | None = None
    mig_slices: Annotated[int, Field(ge=0, le=16)] = 0
    mig_profiles: tuple[_MigTable, ...] = ()
    sources: dict[str, str] = {}


def read_device_file(path: Path) -> Mapping[str, Device]:
    """Return the GPUs described in a TOML file, by name; each GPU is a table.

    Omitted SM limits are taken from the GPU of the catalogue with the nearest compute capability. Raises `InputError`
    when the file cannot be read, a key is missing, unknown or out of range, or a name is in the catalogue already.
    """
    try:
        content = tomllib.loads(read_input(path, "name a TOML file of devices").decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    if not content:
        raise InputError(f"{path} describes no device", "write a table [NAME] for each, as gpuprof's devices.toml")
    return {name: _read_table(path, name, table) for name, table in content.items()}


def _read_table(path: Path, name: str, table: object) -> Device:
    where = f"{path}: [{name}]"
    if not _NAME.fullmatch(name) or name in devices() or name in ("any", "cpu", "gpu"):
        taken = "is a name of gpuprof's own" if _NAME.fullmatch(name) else "must be of a-z, 0-9, '.', '_' and '-'"
        raise InputError(f"{where}: the name {taken}", "call the device otherwise")
    if not isinstance(table, dict):
        raise InputError(f"{where}: it is no table", "write [NAME] once for each device, then its keys")
    try:
        table_model = _DeviceTable.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the table"
        raise InputError(
            f"{where}: {key}: {first['msg']}", "keys and units are those of gpuprof's devices.toml"
        ) from None
    unknown = sorted(set(table_model.tflops) - _RATES)
    if unknown or "float32" not in table_model.tflops:
        problem = f"unknown type {unknown[0]!r}" if unknown else "float32 is missing"
        raise InputError(f"{where}: tflops: {problem}", f"give float32 and, where it has them, of {sorted(_RATES)}")
    values: dict[str, Any] = table_model.model_dump(exclude_none=True, exclude={"sm"})
    values["sm"] = _read_limits(table_model)
    return make_device(name, {"full_name": name, **values, "sources": {"device": str(path), **table_model.sources}})


def _read_limits(table: _DeviceTable) -> dict[str, int]:
    """Return the limits of an SM: from the file, else of the catalogue's GPU with the nearest compute capability."""
    if table.sm is not None:
        return table.sm.model_dump()
    capability = float(table.compute_capability)
    candidates = [gpu for gpu in devices().values() if gpu.sm is not None]
    nearest = min(candidates, key=lambda gpu: abs(float(gpu.compute_capability or 0) - capability))
    assert nearest.sm is not None
    return {key: getattr(nearest.sm, key) for key in SmLimits.__dataclass_fields__}
