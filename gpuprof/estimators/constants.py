"""Constants of GPUs, runtimes, hosts and intervals, each with its source in ``datasets/constants.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from gpuprof.domain.catalogue import datasets


@cache
def _read_data() -> Mapping[str, Any]:
    return tomllib.loads((datasets() / "constants.toml").read_text(encoding="utf-8"))


def constant(table: str, name: str) -> float:
    """Return a number of a table, as ``"memory"`` or ``"host.launch_us"``. Raises `KeyError` where there is none."""
    return _numbers(table)[name]


def find_constant(table: str, name: str, otherwise: float) -> float:
    """Return a number of a table, or ``otherwise`` if it is missing."""
    return _numbers(table).get(name, otherwise)


def process_energy(process_nm: float | None) -> tuple[float, float] | None:
    """Return the watts per TFLOP/s of float32, and the clock in MHz at which they hold; None for unknown processes."""
    entry = _read_data()["energy"]["process"].get(f"{process_nm or 0.0:g}")
    return None if entry is None else (float(entry["watts"]), float(entry["clock_mhz"]))


@cache
def _numbers(table: str) -> Mapping[str, float]:
    content: Any = _read_data()
    for part in table.split("."):
        content = content[part]
    return {name: float(value) for name, value in content.items() if isinstance(value, int | float)}
