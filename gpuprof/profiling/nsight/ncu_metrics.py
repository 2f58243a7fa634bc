"""The counters that gpuprof asks Nsight Compute for, their names on each GPU, and their units.

Names and what they replaced: NVIDIA, Nsight Compute CLI, "nvprof Metric Comparison". Blackwell renamed DRAM's counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from gpuprof.errors import InputError

#: Column of a kernel's row → names of its metric, of which a GPU has one.
COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "duration_ns": ("gpu__time_duration.sum",),
        "achieved_occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
        "sm_active_pct": (
            "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed",
            "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
        ),
        "sm_throughput_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
        "dram_throughput_pct": (
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        ),
        "l2_throughput_pct": (
            "lts__throughput.avg.pct_of_peak_sustained_elapsed",
            "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
        ),
        "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
        "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
        "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
        "instruction_count": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    }
)
#: The same for what is known of a launch without counting: on every GPU, whatever its counters.
LAUNCHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "registers_per_thread": ("launch__registers_per_thread",),
        "static_shared_bytes": ("launch__shared_mem_per_block_static",),
        "dynamic_shared_bytes": ("launch__shared_mem_per_block_dynamic",),
        "waves_per_sm": ("launch__waves_per_multiprocessor",),
        "theoretical_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct",),
        **{f"grid_{axis}": (f"launch__grid_dim_{axis}",) for axis in "xyz"},
        **{f"block_{axis}": (f"launch__block_dim_{axis}",) for axis in "xyz"},
    }
)
#: What ncu's page of details, its default, calls them.
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "Duration": "duration_ns",
        "Achieved Occupancy": "achieved_occupancy_pct",
        "Theoretical Occupancy": "theoretical_occupancy_pct",
        "Compute (SM) Throughput": "sm_throughput_pct",
        "DRAM Throughput": "dram_throughput_pct",
        "L2 Cache Throughput": "l2_throughput_pct",
        "L2 Hit Rate": "l2_hit_pct",
        "Registers Per Thread": "registers_per_thread",
        "Static Shared Memory Per Block": "static_shared_bytes",
        "Dynamic Shared Memory Per Block": "dynamic_shared_bytes",
        "Waves Per SM": "waves_per_sm",
    }
)
#: Sets of columns, cheapest first: each pass over a kernel that a set needs replays it once more.
METRIC_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "creq": ("duration_ns", "achieved_occupancy_pct"),
        "igniter": ("duration_ns", "achieved_occupancy_pct", "l2_throughput_pct", "dram_throughput_pct"),
        "full": tuple(COUNTERS),
    }
)
_ROUNDED = frozenset({"duration_ns", "dram_read_bytes", "dram_write_bytes", "instruction_count", *LAUNCHES}) - {
    "waves_per_sm",
    "theoretical_occupancy_pct",
}
_TIMES_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = re.compile(r"(?:n|u|m)?s(?:econd)?")
_AMOUNT = re.compile(r"(?P<prefix>[KMGT]?)(?:byte|inst|register|block|thread|warp|cycle)?(?:/(?:block|thread))?")
_LISTED = re.compile(r"^\s*([a-z0-9]+__[a-z0-9_]+)\b", re.MULTILINE)
_ENGLISH = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?(?:[eE][+-]?\d+)?")
_NOTHING = frozenset({"", "n/a", "nan", "no data", "(!) nan", "(!) n/a"})


def listed_metrics(printed: str) -> frozenset[str]:
    """Return the base names in what ``ncu --query-metrics`` prints: ``"dram__bytes_read"``, without ``".sum"``."""
    return frozenset(_LISTED.findall(printed))


def resolve_metrics(columns: Sequence[str], listed: frozenset[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the name of each column's metric on a GPU, and the columns of which it has none.

    ``columns``: keys of `COUNTERS`; ``listed``: as `listed_metrics`; empty: not known, so that the oldest name is
    taken.
    """
    names: dict[str, str] = {}
    for column in columns:
        known = [name for name in COUNTERS[column] if not listed or name.split(".")[0] in listed]
        if known:
            names[column] = known[0]
    return names, tuple(column for column in columns if column not in names)


def column_of(metrics: Iterable[str]) -> dict[str, str]:
    """Return metric → column for those of ``metrics`` that gpuprof keeps; of two for one column the first listed."""
    there = set(metrics)
    columns_by_metric: dict[str, str] = {}
    for column, names in (*COUNTERS.items(), *LAUNCHES.items()):
        name = next((name for name in names if name in there), None)
        if name is not None:
            columns_by_metric[name] = column
    columns = set(columns_by_metric.values())
    return columns_by_metric | {
        name: column for name, column in LABELS.items() if name in there and column not in columns
    }


def in_column_unit(column: str, value: float, unit: str) -> float:
    """Return ``value``, given in ``unit``, in the unit that the column's name says.

    Raises `InputError` for a unit that does not fit the column.
    """
    converted = value * _factor(column, unit)
    return float(round(converted)) if column in _ROUNDED else converted


def number_of(text: str) -> float | None:
    """Return the number in ``text``, with or without separators of thousands; None where nothing was measured.

    Raises `InputError` for a number of another country's style, which cannot be told from ours one by one.
    """
    stripped = text.strip()
    if stripped.lower() in _NOTHING:
        return None
    if not _ENGLISH.fullmatch(stripped):
        raise InputError(f"cannot read the number {text!r}", "export with LC_ALL=C: ncu writes numbers by the locale")
    return float(stripped.replace(",", ""))


def _factor(column: str, unit: str) -> float:
    if column.endswith("_pct"):
        if unit in ("%", ""):
            return 1.0
    elif column.endswith("_ns"):
        if _TIME.fullmatch(unit):
            return _TIMES_NS[unit.replace("second", "s")]
    elif match := _AMOUNT.fullmatch(unit):
        return _PREFIXES[match["prefix"]]
    raise InputError(f"the unit {unit!r} does not fit {column}", "export with --print-units base")
