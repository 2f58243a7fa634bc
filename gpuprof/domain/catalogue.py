"""The catalogue of devices shipped with gpuprof; GPUs of a user's file, or described by drivers and reports."""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuprof.domain.device import Device, MigProfile, SmLimits
from gpuprof.domain.file_access import decode_text, read_input
from gpuprof.domain.validation import Count
from gpuprof.errors import InputError, unknown_name


def datasets() -> Traversable:
    """Return the directory of the data shipped with gpuprof."""
    return files("gpuprof") / "datasets"


@cache
def devices() -> Mapping[str, Device]:
    """Return every device of ``datasets/devices.toml`` by name."""
    return MappingProxyType({name: table.to_device(name) for name, table in _read_tables().items()})


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
        if driver_name in table.driver_names:
            return devices()[name]
    return None


@cache
def _read_tables() -> dict[str, _DeviceTable]:
    with (datasets() / "devices.toml").open("rb") as file:
        return {name: _DeviceTable.model_validate(table) for name, table in tomllib.load(file).items()}


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
_RATES = frozenset({"float64", "float32", "tfloat32", "float16", "bfloat16", "int8", "float8", "float4"})


class _Table(BaseModel):
    """Keys of a GPU; units as in the catalogue."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _MigTable(_Table):
    name: Annotated[str, Field(pattern=r"^\d+g\.\d+gb$")]
    sms: Count
    memory_mib: _Positive
    memory_slices: Count
    compute_slices: Count
    start_slots: tuple[Annotated[int, Field(ge=0, lt=16)], ...]
    max_count: Count

    def to_profile(self) -> MigProfile:
        """Return the profile, in the units of the package."""
        return MigProfile(**self.model_dump(exclude={"memory_mib"}), memory_bytes=int(self.memory_mib * 2**20))


class _DeviceTable(_Table):
    compute_units: Count
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
    price_interval: tuple[_Positive, _Positive] | None = None
    price_date: str | None = None
    dram_type: str | None = None
    sm: SmLimits | None = None
    mig_slices: Annotated[int, Field(ge=0, le=16)] = 0
    mig_profiles: tuple[_MigTable, ...] = ()
    sources: dict[str, str] = {}

    def to_device(self, name: str) -> Device:
        """Return the device, in the units of the package."""
        copied = {"compute_units", "clock_mhz", "compute_capability", "process_nm", "max_power_w", "dram_type"}
        copied |= {"price_per_hour", "price_interval", "price_date", "mig_slices"}
        return Device(
            name=name,
            kind="gpu",
            **self.model_dump(include=copied),
            flops_per_s=MappingProxyType({dtype: float(round(rate * 1e12)) for dtype, rate in self.tflops.items()}),
            dram_bytes=int(self.dram_mib * 2**20),
            dram_bytes_per_s=self.dram_gb_per_s * 1e9,
            l2_bytes=int(self.l2_mib * 2**20),
            sm=self.sm,
            mig_profiles=tuple(profile.to_profile() for profile in self.mig_profiles),
            sources=MappingProxyType({"name": self.full_name or name, **self.sources}),
        )


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
    limits = table_model.sm or _nearest_limits(float(table_model.compute_capability))
    sources = {"device": str(path), **table_model.sources}
    return table_model.model_copy(update={"sm": limits, "sources": sources}).to_device(name)


def _nearest_limits(capability: float) -> SmLimits | None:
    """Return the limits of an SM of the catalogue's GPU with the nearest compute capability."""
    return min(devices().values(), key=lambda gpu: abs(float(gpu.compute_capability or 0) - capability)).sm


#: Brand words before or after a product's name, which do not distinguish boards.
_BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "rtx", "gtx", "gpu", "hgx"})
_SXM = re.compile(r"sxm\d?")
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")
_JOINED = re.compile(r"^(rtx|gtx)(?=\d{4})")
#: Least digits of a product's number (the 4090 of an RTX 4090); shorter numbers are gigabytes.
_PRODUCT_DIGITS = 4
#: Words of a board's name besides the product: form factor, memory, server edition.
_FORMS = frozenset({"pcie", "sxm", "nvl", "hbm3", "hbm3e", "blackwell", "server", "edition", "one", "of", "the", "two"})


def matching_names(text: str) -> tuple[str, ...]:
    """Return the names of the boards in the catalogue that ``text`` may denote, in the catalogue's order.

    Every word of the text must occur in the board's names, and every word of the product's name in the text: ``"A100"``
    matches four boards, ``"RTX 6000"`` does not match RTX PRO 6000.

    Examples
    --------
    >>> matching_names("NVIDIA A100-SXM4-80GB"), matching_names("GeForce RTX 4090")
    (('a100-80',), ('rtx-4090',))
    """
    query = _words(text)
    if not query:
        return ()
    names = []
    for name, device in devices().items():
        words = _words(name)
        every = words.union(*(_words(label) for label in (device.sources["name"], *_read_tables()[name].driver_names)))
        if set(filter(_is_of_product, words)) <= query <= every:
            names.append(name)
    return tuple(names)


def _is_of_product(word: str) -> bool:
    return word not in _FORMS and not (word.isdigit() and len(word) < _PRODUCT_DIGITS)


def _words(text: str) -> set[str]:
    parts = (_JOINED.sub("", part) for part in re.split(r"[^a-z0-9]+", text.lower()))
    return set(_plain_words(part for part in parts if part)) - _BRANDS


def _plain_words(parts: Iterable[str]) -> Iterable[str]:
    for part in parts:
        memory = _MEMORY.fullmatch(part)
        yield memory[1] if memory else "sxm" if _SXM.fullmatch(part) else part


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """Properties of a board; None: not given."""

    name: str  #: Name by the driver, ``"NVIDIA H100 80GB HBM3"``.
    compute_capability: str | None = None  #: ``"9.0"``.
    sms: int | None = None
    clock_mhz: float | None = None  #: Highest clock of the SMs.
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    #: ``warps_per_sm``, ``registers_per_sm``, ``shared_bytes_per_sm``, ``shared_bytes_per_block``: Limits of an SM and
    #: of a block, for a block the opt-in maximum.
    warps_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
    shared_bytes_per_block: int | None = None


def describe_device(description: GpuDescription, source: str = "the report") -> Device | None:
    """Return the device of this name in the catalogue, else a device scaled from a board of equal compute capability.

    None for a device outside the catalogue whose number of SMs is missing, or whose compute capability is missing or
    not in the catalogue. ``source``: origin of the description, for ``Device.sources``.
    """
    catalogued = device_of_driver(description.name)
    if catalogued is not None:
        return catalogued
    siblings = [gpu for gpu in devices().values() if gpu.compute_capability == description.compute_capability]
    if not siblings or description.compute_capability is None or not description.sms:
        return None
    sms = description.sms
    base = min(siblings, key=lambda gpu: (abs(gpu.compute_units - sms), gpu.name))
    clock = description.clock_mhz or base.clock_mhz
    ratio = sms * clock / (base.compute_units * base.clock_mhz)
    bandwidth = description.memory_bytes_per_s or base.dram_bytes_per_s
    return replace(
        base,
        name=device_slug(description.name),
        compute_units=sms,
        clock_mhz=clock,
        flops_per_s=MappingProxyType({dtype: rate * ratio for dtype, rate in base.flops_per_s.items()}),
        dram_bytes=description.memory_bytes or base.dram_bytes,
        dram_bytes_per_s=bandwidth,
        l2_bytes=description.l2_bytes or base.l2_bytes,
        sm=None if base.sm is None else _scale_limits(description, base.sm),
        # These values do not scale from another board, and guesses would enter plans as facts.
        max_power_w=None,
        price_per_hour=None,
        price_interval=None,
        price_date=None,
        mig_slices=0,
        mig_profiles=(),
        sources=MappingProxyType(_describe_sources(description, base, source)),
    )


_GPUHUNT = "python -m gpuhunt PROVIDER --output FILE.csv writes offers"


def read_offers(path: Path, boards: Iterable[Device]) -> Mapping[str, Device]:
    """Return the boards of ``boards`` with an offer, by name, at the prices of a catalogue that gpuhunt wrote.

    The catalogue is a CSV file, or a folder with a file for each provider. The price of a board is the median over
    providers and locations of the cheapest hour of a GPU on demand, its interval the lowest and the highest of these,
    its date that of the oldest file. gpuhunt does not tell a PCIe board from an SXM one: an offer is of each board that
    its name and memory fit. Raises `InputError` when a file cannot be read, or offers none of the boards.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    cheapest: dict[tuple[str, float, str, str], float] = {}
    for file in files:
        text = decode_text(read_input(file, "name a CSV file that gpuhunt wrote"), file)
        for line, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            try:
                price, count = float(row["price"]), int(row["gpu_count"])
                if count > 0 and 0.0 < price < math.inf and row["spot"].lower() == "false":
                    name, memory_gb = row["gpu_name"].lower(), float(row["gpu_memory"] or 0.0)
                    place = (name, memory_gb, row.get("provider") or file.stem, row["location"])
                    cheapest[place] = min(price / count, cheapest.get(place, math.inf))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InputError(f"{file}:{line}: not an offer of gpuhunt: {error!r}", _GPUHUNT) from None
    offered = {}
    for board in boards:
        prices = [price for (name, memory_gb, *_), price in cheapest.items() if _is_offered(board, name, memory_gb)]
        if prices:
            day = datetime.fromtimestamp(min(file.stat().st_mtime for file in files), UTC).date().isoformat()
            offered[board.name] = board.with_price(median(prices), (min(prices), max(prices)), day)
    if not offered:
        raise InputError(f"{path} offers no known GPU on demand", _GPUHUNT)
    return offered


def _is_offered(board: Device, name: str, memory_gb: float) -> bool:
    """Return whether an offer of ``"a100"`` or ``"rtx6000ada"`` may be the board, with the memory as sold."""
    words = board.name.split("-")
    labels = "".join(words), "".join(filter(_is_of_product, words))
    is_named = name.removeprefix("rtx") in [label.removeprefix("rtx") for label in labels]
    return is_named and abs(board.dram_bytes / 2**30 - memory_gb) < memory_gb / 8


def device_slug(driver_name: str) -> str:
    """Return the device name for a driver's name: ``"NVIDIA L40S"`` gives ``"l40s"``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"nvidia|tesla", "", driver_name.lower())).strip("-") or "gpu"


def _scale_limits(description: GpuDescription, base: SmLimits) -> SmLimits:
    block = description.shared_bytes_per_block or base.max_shared_memory_per_block_bytes
    return replace(
        base,
        warps=description.warps_per_sm or base.warps,
        threads=base.threads // base.warps * (description.warps_per_sm or base.warps),
        registers=description.registers_per_sm or base.registers,
        shared_memory_bytes=description.shared_bytes_per_sm or base.shared_memory_bytes,
        max_shared_memory_per_block_bytes=max(block, base.max_shared_memory_per_block_bytes),
    )


def _describe_sources(description: GpuDescription, base: Device, source: str) -> dict[str, str]:
    reported = {
        "clock": description.clock_mhz,
        "memory": description.memory_bytes,
        "bandwidth": description.memory_bytes_per_s,
        "L2": description.l2_bytes,
    }
    missing = [name for name, value in reported.items() if not value]
    assumed = f"; {', '.join(missing)} as of {base.name}" if missing else ""
    return {
        "name": description.name,
        "compute": f"in proportion to {base.name}, by SMs and clock that {source} reports{assumed}",
        "memory": f"as {source} reports it{assumed}",
        "limits": base.sources["limits"],
        "power": "unknown",
        "price": "none: this board is not in the catalogue",
    }
