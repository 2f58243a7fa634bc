"""Fleets: the devices available to a placement, with counts and prices."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.file_access import read_input
from gpuprof.errors import InputError

#: Name for all devices with a price.
ANY = "any"
_ITEM = re.compile(r"(?P<name>[^:]*[^:\s])\s*(?::(?P<count>[^:]*))?")


@dataclass(frozen=True, slots=True)
class FleetEntry:
    """Devices of a kind."""

    device: Device
    count: int | None = None  #: Available devices; None: as many as needed.

    @property
    def price_per_hour(self) -> float:
        """Price of a device per hour; 1.0 for a device without a price, so that the cost counts devices."""
        return 1.0 if self.device.price_per_hour is None else self.device.price_per_hour


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices available to a placement.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> Fleet((FleetEntry(device("a100-80"), 8), FleetEntry(device("t4")))).is_elastic
    True
    """

    entries: tuple[FleetEntry, ...]

    @property
    def is_elastic(self) -> bool:
        """Whether some kind of device has no limit."""
        return any(entry.count is None for entry in self.entries)


def parse_fleet(text: str, find_device: Callable[[str], Device], priced: Sequence[Device] = ()) -> Fleet:
    """Parse ``"a100-80:8,v100"``: names with counts; without a count, as many as needed.

    ``"any"`` adds every other device of ``priced``, as many as needed. Raises `InputError` for an item that is empty
    or not NAME or NAME:COUNT, and for an unknown device. ``find_device``: name → `Device`; raises `InputError` for an
    unknown name.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> [(entry.device.name, entry.count) for entry in parse_fleet("a100-80:8,t4", device).entries]
    [('a100-80', 8), ('t4', None)]
    """
    entries: list[FleetEntry] = []
    has_all = False
    for item in (part.strip() for part in text.split(",")):
        if not item:
            raise InputError(f"a device without a name in {text!r}", "write names between commas, as in a100-80:8,v100")
        match = _ITEM.fullmatch(item)
        if match is None:
            raise InputError(f"cannot read {item!r} in --gpus", "write name or name:count, as in a100-80:8")
        if match["name"].lower() == ANY:
            if match["count"] is not None:
                raise InputError(f"{item!r}: any takes no count", "write any, or name the devices that are counted")
            has_all = True
            continue
        count = None if match["count"] is None else _parse_count(match["count"], item)
        entries.append(FleetEntry(find_device(match["name"]), count))
    if has_all:
        names = {entry.device.name for entry in entries}
        entries += [FleetEntry(device) for device in priced if device.name not in names]
    return _build_fleet(entries, text)


def read_fleet(path: Path, find_device: Callable[[str], Device]) -> Fleet:
    """Read fleet.toml: ``[[gpus]]`` tables with ``device``, and optionally ``count`` and ``price_per_hour``."""
    try:
        content = tomllib.loads(read_input(path, "name a TOML file with [[gpus]]").decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}", 'write [[gpus]] then device = "a100-80"') from None
    tables = content.get("gpus")
    if not isinstance(tables, list):
        raise InputError(f"{path} has no [[gpus]] table", 'write [[gpus]] then device = "a100-80"')
    return _build_fleet([_parse_entry(table, path, find_device) for table in tables], str(path))


def _parse_entry(table: object, path: Path, find_device: Callable[[str], Device]) -> FleetEntry:
    if not isinstance(table, dict) or not isinstance(table.get("device"), str):
        raise InputError(f"{path}: each [[gpus]] table needs a device name", 'write [[gpus]], then device = "a100-80"')
    if unknown := set(table) - {"device", "count", "price_per_hour"}:
        raise InputError(
            f"{path}: unknown key {sorted(unknown)[0]!r} in [[gpus]]", "known: device, count, price_per_hour"
        )
    device = find_device(table["device"])
    price = table.get("price_per_hour")
    if price is not None:
        # TOML's ``true`` is a bool, hence an int, and would be a price of $1.
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e9:
            raise InputError(
                f"{path}: price_per_hour must be a number above 0 but got {price!r}",
                "write dollars an hour, such as 3.43",
            )
        device = device.with_price(price)
    count = table.get("count")
    return FleetEntry(device, None if count is None else _parse_count(str(count), table["device"]))


def _parse_count(text: str, item: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text.strip()):
        raise InputError(
            f"the count of a device must be a whole number from 1 to 999,999,999 but got {text!r} for {item}",
            "write a100-80:8, or a100-80 for as many as needed",
        )
    return int(text)


def _build_fleet(entries: list[FleetEntry], where: str) -> Fleet:
    if not entries:
        raise InputError(f"no devices in {where!r}", "name at least one, as in a100-80:8")
    names = [entry.device.name for entry in entries]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{sorted(duplicates)[0]} stands twice in {where!r}", "give one count for it")
    return Fleet(tuple(entries))
