"""Runs Nsight Compute over the program that is to be counted, and reads its counters of each kernel.

Counters come as CSV, or as ncu's own file through the package shipped with it. Both kinds of CSV are read, in any
encoding and locale: ``--page raw``, with a row per kernel and the units in the second row, and the default, with a row
per metric and kernel. Other columns are skipped. For metric names and their predecessors see NVIDIA, Nsight Compute
CLI, "nvprof Metric Comparison". Blackwell renamed DRAM's counters.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.domain.file_access import decode_text, read_input
from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.profiling.nsight.tool_process import ask_tool, find_tool, run_tool
from gpuprof.profiling.timeline.timeline import RUN_RANGE
from gpuprof.profiling.timeline.timeline import column as column_or_nulls

#: Column of a kernel's row → alternative names of its metric, depending on the GPU.
COUNTERS: Mapping[str, tuple[str, ...]] = {
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
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "instruction_count": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
}
#: The same for facts of a launch that need no counting.
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "registers_per_thread": ("launch__registers_per_thread",),
    "static_shared_bytes": ("launch__shared_mem_per_block_static",),
    "dynamic_shared_bytes": ("launch__shared_mem_per_block_dynamic",),
    "waves_per_sm": ("launch__waves_per_multiprocessor",),
    "theoretical_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    **{f"grid_{axis}": (f"launch__grid_dim_{axis}",) for axis in "xyz"},
    **{f"block_{axis}": (f"launch__block_dim_{axis}",) for axis in "xyz"},
}
#: Labels of the same on ncu's page of details, its default.
LABELS: Mapping[str, str] = {
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
#: Counters that fit a single pass over a kernel on GH100, GA100, AD102 and GB100, according to CUPTI's host API
#: (libcupti 13.0). The L2 hit rate needs a second pass, ``sm__throughput`` eight.
ONE_PASS = tuple(name for name in COUNTERS if name not in ("sm_throughput_pct", "l2_hit_pct"))
_ROUNDED = frozenset({"duration_ns", "dram_read_bytes", "dram_write_bytes", "instruction_count", *LAUNCHES}) - {
    "waves_per_sm",
    "theoretical_occupancy_pct",
}
_TIMES_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = re.compile(r"(?:n|u|m)?s(?:econd)?")
_AMOUNT = re.compile(r"(?P<prefix>[KMGT]?)(?:byte|inst|register|block|thread|warp|cycle)?(?:/(?:block|thread))?")
_LISTED = re.compile(r"^\s*([a-z0-9]+__[a-z0-9_]+)\b", re.MULTILINE)
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")
#: Thousands separators of all locales, other than "." and ",".
_SPACES = re.compile(r"[\s\u00a0\u202f'’]")
_NOTHING = frozenset({"", "n/a", "nan", "no data", "(!) nan", "(!) n/a"})

_SHAPE = re.compile(r"\(?\s*(\d{1,10}),\s*(\d{1,10}),\s*(\d{1,10})\s*\)?")
_ID, _NAME, _PROCESS, _STREAM = "ID", "Kernel Name", "Process ID", "Stream"
_LONG = ("Metric Name", "Metric Unit", "Metric Value")
_DEVICE, _RULE, _ATTRIBUTE = "Device", ("Rule ", "Estimated Speedup"), "device__attribute_"
_GPU = f"{_ATTRIBUTE}display_name"
#: Attributes that describe a GPU; all others are skipped, since some are not numeric.
_DESCRIBING = (
    "compute_capability_major",
    "compute_capability_minor",
    "multiprocessor_count",
    "clock_rate",
    "max_gpu_frequency_khz",
    "memory_clock_rate",
    "global_memory_bus_width",
    "max_threads_per_multiprocessor",
    "l2_cache_size",
    "max_registers_per_multiprocessor",
    "max_shared_memory_per_multiprocessor",
    "max_shared_memory_per_block_optin",
)
_CSV_FIX = "ncu --import REPORT --csv --page raw --print-units base writes one"
_COUNTERS_FIX = (
    "on the host set NVreg_RestrictProfilingToAdminUsers=0 and reboot, or start the container with "
    "--cap-add=SYS_ADMIN; nothing inside the container cures it, timing works without"
)
#: Words of ncu's complaints → the rule and the fix.
_FAILURES: Mapping[str, tuple[str, str]] = {
    "ERR_NVGPUCTRPERM": ("ncu may not read this GPU's counters (ERR_NVGPUCTRPERM)", _COUNTERS_FIX),
    "driver resource was unavailable": (
        "another profiler holds this GPU's counters (a driver resource was unavailable)",
        "end it, or where it is DCGM: dcgmi profile --pause",
    ),
    "No kernels were profiled": ("ncu saw no kernel", "does the program launch any in the range that was asked for?"),
}
#: Clocks unlocked and caches warm, as in normal runs of the model; both are recorded in the run's settings.
CONDITIONS = {"clock_control": "none", "cache_control": "none"}
#: Modes of counting, in order of preference: a single pass in a single run of the program; replay of each kernel;
#: replay of a single launch of each kernel and grid.
_MODES: Mapping[str, tuple[str, ...]] = {
    "application replay": ("--replay-mode", "application"),
    "kernel replay": ("--replay-mode", "kernel"),
    "kernel replay of distinct launches": (
        *("--replay-mode", "kernel"),
        *("--filter-mode", "per-launch-config", "--launch-count", "1"),
    ),
}


@dataclass(frozen=True)
class Counters:
    """Counters of kernels."""

    #: ``name``, ``process_id``, ``stream_id``, ``device_index``, and the counted columns of `COUNTERS` and `LAUNCHES`,
    #: NaN for a kernel without a value; in the order of launch.
    kernels: pd.DataFrame
    gpus: Mapping[int, GpuDescription] = field(default_factory=dict)  #: ``device_index`` → the report's description.
    notes: tuple[str, ...] = ()  #: Columns and values that could not be read, and why.
    distinct: bool = False  #: A single launch of each kernel and grid was counted, representing all its launches.

    def by_gpu(self) -> dict[int, Counters]:
        """Return the counters of each GPU by its index; a single GPU gets the whole table."""
        index = pd.to_numeric(column_or_nulls(self.kernels, "device_index"), errors="coerce").fillna(0).astype(np.int64)
        gpus = sorted(index.unique().tolist())
        if len(gpus) <= 1:
            return {int(gpus[0]) if gpus else 0: self}
        return {
            int(gpu): replace(
                self,
                kernels=self.kernels[(index == gpu).to_numpy()].reset_index(drop=True),
                gpus={gpu: self.gpus[gpu]} if gpu in self.gpus else {},
            )
            for gpu in gpus
        }


def listed_metrics(output: str) -> frozenset[str]:
    """Return the base names in the output of ``ncu --query-metrics``: ``"dram__bytes_read"``, without ``".sum"``."""
    return frozenset(_LISTED.findall(output))


def resolve_metrics(columns: Sequence[str], metrics: frozenset[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the metric name of each column on a GPU, and the columns without a metric.

    ``columns``: keys of `COUNTERS`; ``metrics``: as `listed_metrics`; empty: unknown, so the first name is used.
    """
    names: dict[str, str] = {}
    for column in columns:
        available = [name for name in COUNTERS[column] if not metrics or name.split(".")[0] in metrics]
        if available:
            names[column] = available[0]
    return names, tuple(column for column in columns if column not in names)


def column_of(metrics: Iterable[str]) -> dict[str, str]:
    """Return metric → column for the supported ``metrics``; of two for the same column, the first listed."""
    names_present = set(metrics)
    columns_by_metric: dict[str, str] = {}
    for column, names in (*COUNTERS.items(), *LAUNCHES.items()):
        name = next((name for name in names if name in names_present), None)
        if name is not None:
            columns_by_metric[name] = column
    columns = set(columns_by_metric.values())
    return columns_by_metric | {
        name: column for name, column in LABELS.items() if name in names_present and column not in columns
    }


def in_column_unit(column: str, value: float, unit: str) -> float:
    """Return ``value``, given in ``unit``, in the unit of the column's name.

    Raises `InputError` for a unit that does not fit the column.
    """
    converted = value * _find_factor(column, unit)
    if not abs(converted) < 2.0**62:
        raise InputError(f"{column} cannot be {converted:g}", "is the file damaged?")
    return float(round(converted)) if column in _ROUNDED else converted


def _find_factor(column: str, unit: str) -> float:
    if column.endswith("_pct"):
        if unit in ("%", ""):
            return 1.0
    elif column.endswith("_ns"):
        if _TIME.fullmatch(unit):
            return _TIMES_NS[unit.replace("second", "s")]
    elif match := _AMOUNT.fullmatch(unit):
        return _PREFIXES[match["prefix"]]
    raise InputError(f"the unit {unit!r} does not fit {column}", "export with --print-units base")


def find_decimal_mark(texts: Iterable[str]) -> str:
    """Return the decimal mark of the numbers in a table, ``"."`` if undecidable.

    A mark that occurs twice in a number, or before the other mark, separates thousands; a mark not followed by exactly
    three digits is decimal. Raises `InputError` when numbers contradict each other.
    """
    decimal: set[str] = set()
    for text in texts:
        number = _SPACES.sub("", text)
        if not _NUMBER.fullmatch(number):
            continue
        marks = [mark for mark in number if mark in ".,"]
        if not marks:
            continue
        opposite = {".": ",", ",": "."}
        if len(set(marks)) == 2:
            decimal.add(marks[-1])
        elif len(marks) > 1:
            decimal.add(opposite[marks[0]])
        elif len(re.split(r"[.,eE]", number)[1]) != 3:
            decimal.add(marks[0])
    if len(decimal) > 1:
        raise InputError("numbers with a decimal comma and with a decimal point", "export with LC_ALL=C")
    return decimal.pop() if decimal else "."


def number_of(text: str, mark: str = ".") -> float | None:
    """Return the number in ``text`` with the decimal mark ``mark``; None for a missing value.

    Raises `InputError` for a word.
    """
    stripped = _SPACES.sub("", text)
    if text.strip().lower() in _NOTHING:
        return None
    if not _NUMBER.fullmatch(stripped):
        raise InputError(f"cannot read the number {text!r}", "export with LC_ALL=C: ncu writes numbers by the locale")
    return float(stripped.replace("," if mark == "." else ".", "").replace(",", "."))


class CountersRefusedError(UnavailableError):
    """Counting is not permitted here, in any mode of ncu."""


def known_failure(output: str) -> UnavailableError | None:
    """Return the error for a known ncu failure in ``output`` that a user can fix."""
    for words, (rule, fix) in _FAILURES.items():
        if words in output:
            return CountersRefusedError(rule, fix)
    return None


def read_text(path: Path) -> str:
    """Return a text file's content, in which a profiled program may have written anything.

    Raises `InputError` when the file is unreadable.
    """
    return decode_text(read_input(path, _CSV_FIX), path, errors="replace")


def parse_ncu_csv(text: str, source: str) -> Counters:
    """Return the counters in a CSV of ncu, with other output around the table; ``source`` names it in messages.

    Raises `InputError` when the text has no such table, or ends in the middle of a row; `UnavailableError` when it
    contains a failure message of ncu instead.
    """
    header, *body = _list_rows(text, source)
    try:
        launches, units = (_list_long if all(name in header for name in _LONG) else _list_wide)(header, body)
        if not launches:
            raise InputError("it has no kernel", "was any launched in the range that was asked for?")
        metrics = column_of({name for cells in launches for name in cells})
        if not metrics:
            raise InputError("none of its metrics is one that gpuprof keeps", f"{_CSV_FIX} with their own")
        return _make_counters(launches, units, metrics)
    except InputError as error:
        raise InputError(f"{source}: {error.message}", error.fix) from None


def read_ncu_rep(path: Path) -> Counters:
    """Return the counters in an ``.ncu-rep`` file, through the package ``ncu_report`` or else through ``ncu --import``.

    Raises `InputError` when the file is not such a report; `UnavailableError` when both are missing.
    """
    if not path.is_file():
        raise InputError(f"cannot read {path}: no such file")
    try:
        package = importlib.import_module("ncu_report")
    except ImportError:
        return _import_with_ncu(path)
    try:
        return _read_with_package(package.load_report(str(path)), package)
    except GpuprofError:
        raise
    except Exception as error:  # the package raises arbitrary errors of its C++ code
        raise InputError(f"{path} is not a report of Nsight Compute: {error}") from error


def _import_with_ncu(path: Path) -> Counters:
    binary = find_tool("ncu")
    if binary is None:
        raise UnavailableError(
            f"{path} needs Nsight Compute to be read: neither ncu nor the package ncu_report is installed",
            f"pip install ncu-report, or on a machine with Nsight Compute, {_CSV_FIX}",
        )
    command = [str(binary), "--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]

    def explain_refusal(output: str) -> GpuprofError:
        return InputError(f"ncu cannot read {path}: {(output.strip().splitlines() or ['it does not say why'])[-1]}")

    return parse_ncu_csv(run_tool(command, explain=explain_refusal), str(path))


def _list_rows(text: str, source: str) -> Iterator[list[str]]:
    """Yield the table's rows, header first; lines printed by other programs are skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(f'"{_ID}",') and _NAME in line), None)
    if start is None:
        failure = known_failure(text)
        if failure is not None:
            raise failure
        raise InputError(f"{source} has no table of Nsight Compute", _CSV_FIX)
    header = next(csv.reader([lines[start]]))
    yield header
    number = start + 1
    while number < len(lines):
        line, first = lines[number], number + 1
        number += 1
        if not line.startswith('"'):
            continue
        while line.count('"') % 2 and number < len(lines):  # a rule's description has lines
            line, number = f"{line}\n{lines[number]}", number + 1
        row = next(csv.reader([line]))
        missing = header[len(row) :]
        if line.count('"') % 2 or len(row) > len(header) or not all(name.startswith(_RULE) for name in missing):
            raise InputError(f"{source}:{first} is not a whole row of {len(header)} columns", "is the file cut off?")
        yield [*row, *[""] * len(missing)]


#: A launch's cells by title, its metrics among them; and for each metric its unit.
_Launches = tuple[list[dict[str, str]], Mapping[str, str]]


def _list_wide(header: Sequence[str], body: Sequence[Sequence[str]]) -> _Launches:
    has_units = bool(body) and not body[0][header.index(_ID)]
    units = dict(zip(header, body[0], strict=True)) if has_units else {}
    return [dict(zip(header, row, strict=True)) for row in body[has_units:]], units


def _list_long(header: Sequence[str], body: Sequence[Sequence[str]]) -> _Launches:
    launches: dict[tuple[str, str], dict[str, str]] = {}
    units: dict[str, str] = {}
    for row in body:
        cells = dict(zip(header, row, strict=True))
        launch = launches.setdefault((cells.get(_PROCESS, ""), cells[_ID]), cells)
        name, unit, value = (cells[part] for part in _LONG)
        if name:  # a rule's row has none
            # Scaled units differ from row to row: the value goes with its own.
            launch[name], launch[f"{name} unit"] = value, unit
    return list(launches.values()), units


def _make_counters(
    launches: Sequence[Mapping[str, str]], units: Mapping[str, str], metrics: Mapping[str, str]
) -> Counters:
    mark = find_decimal_mark(cells.get(metric, "") for cells in launches for metric in metrics)
    columns: dict[str, Any] = {
        "name": [cells[_NAME] for cells in launches],
        "process_id": [_whole(cells.get(_PROCESS, "")) for cells in launches],
        "stream_id": [_whole(cells.get(_STREAM, "")) for cells in launches],
        "device_index": [_whole(cells.get(_DEVICE, "")) for cells in launches],
    }
    for title, prefix in (("Grid Size", "grid"), ("Block Size", "block")):
        shapes = [_SHAPE.fullmatch(cells.get(title, "")) for cells in launches]
        if all(shapes):
            for place, axis in enumerate("xyz", start=1):
                columns[f"{prefix}_{axis}"] = [int(shape[place]) for shape in shapes if shape]
    notes = []
    for metric, name in metrics.items():
        if name in columns:
            continue
        texts = [cells.get(metric, "") for cells in launches]
        numbers = [_number_or_none(text, mark) for text in texts]
        words = [t for t, n in zip(texts, numbers, strict=True) if n is None and t.strip().lower() not in _NOTHING]
        if words:
            notes.append(f"{len(words)} of {len(texts)} values of {name} could not be read: {words[0]!r} is no number")
        if len(words) == len(texts):
            continue
        try:
            columns[name] = [
                np.nan
                if number is None
                else in_column_unit(name, number, cells.get(f"{metric} unit", units.get(metric, "")))
                for number, cells in zip(numbers, launches, strict=True)
            ]
        except InputError as error:  # a broken column must not discard the others
            notes.append(f"{name} could not be read: {error.message}")
    if not set(COUNTERS) & set(columns):
        raise InputError("; ".join(notes) or "it has no counters", _CSV_FIX)
    gpus: dict[int, GpuDescription] = {}
    for cells in launches:
        index = _whole(cells.get(_DEVICE, ""))
        if index not in gpus and cells.get(_GPU):
            attributes = {name: _number_or_none(cells.get(_ATTRIBUTE + name, ""), mark) for name in _DESCRIBING}
            gpus[index] = _describe_gpu(cells[_GPU], attributes)
    return Counters(pd.DataFrame(columns), gpus, tuple(notes))


def _number_or_none(text: str, mark: str) -> float | None:
    """Return the number in a cell; None for a word, as newer drivers have among attributes."""
    try:
        return number_of(text, mark)
    except InputError:
        return None


def _whole(text: str) -> int:
    return int(re.sub(r"\D", "", text)[:18] or 0)


def _describe_gpu(name: str, numbers: Mapping[str, float | None]) -> GpuDescription:
    """Return the description in ncu's attributes; clocks are in kHz, and the memory clock counts both edges."""

    def whole(attribute: str) -> int | None:
        value = numbers.get(attribute)
        return None if not value else int(value)

    major, minor = (numbers.get(f"compute_capability_{part}") for part in ("major", "minor"))
    clock, memory_clock = whole("clock_rate") or whole("max_gpu_frequency_khz"), whole("memory_clock_rate")
    bus_bits, threads = whole("global_memory_bus_width"), whole("max_threads_per_multiprocessor")
    return GpuDescription(
        name,
        compute_capability=None if major is None or minor is None else f"{int(major)}.{int(minor)}",
        sms=whole("multiprocessor_count"),
        clock_mhz=clock / 1e3 if clock else None,
        memory_bytes_per_s=bus_bits / 8 * memory_clock * 1e3 * 2 if bus_bits and memory_clock else None,
        l2_bytes=whole("l2_cache_size"),
        warps_per_sm=threads // 32 if threads else None,
        registers_per_sm=whole("max_registers_per_multiprocessor"),
        shared_bytes_per_sm=whole("max_shared_memory_per_multiprocessor"),
        shared_bytes_per_block=whole("max_shared_memory_per_block_optin"),
    )


def _read_with_package(context: Any, package: Any) -> Counters:
    launches: list[dict[str, str]] = []
    demangled = getattr(package.IAction, "NameBase_DEMANGLED", None)
    parts = [context.range_by_idx(index) for index in range(context.num_ranges())]
    for action in (part.action_by_idx(index) for part in parts for index in range(part.num_actions())):
        names = set(action.metric_names())
        cells = {_NAME: str(action.name() if demangled is None else action.name(demangled))}
        for metric in names & {*column_of(names), *(f"{_ATTRIBUTE}{name}" for name in _DESCRIBING)}:
            value = action.metric_by_name(metric)
            with suppress(Exception):  # a word or nothing, where the package raises arbitrary errors
                cells |= {metric: repr(float(value.as_double())), f"{metric} unit": str(value.unit() or "")}
        if _GPU in names:
            cells[_GPU] = str(action.metric_by_name(_GPU).as_string())
        launches.append(cells)
    if not launches:
        raise InputError("the report has no kernel", "was any launched in the range that was asked for?")
    return _make_counters(launches, {}, column_of({name for cells in launches for name in cells}))


def count_events(
    command: Sequence[str],
    directory: Path,
    *,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[Counters, tuple[str, ...]]:
    """Run ``command`` under ncu and return the counters of its marked runs, and notes, including the mode of counting.

    After a failed or hung mode the next mode is tried. Raises `UnavailableError` when ncu is missing, lacks permission
    to count, or fails in all modes.
    """
    binary = find_tool("ncu")
    if binary is None:
        raise UnavailableError("ncu is not installed", "install Nsight Compute (CUDA toolkit)")
    names, missing = resolve_metrics(ONE_PASS, _list_metrics(binary))
    notes = tuple(f"this GPU has no counter for {column}" for column in missing)
    # Facts of a launch need no pass over the kernel.
    launches = ["launch__registers_per_thread", "launch__waves_per_multiprocessor"]
    launches += [f"launch__shared_mem_per_block_{kind}" for kind in ("static", "dynamic")]
    metrics = ",".join([*names.values(), *launches, "sm__maximum_warps_per_active_cycle_pct"])
    failures: list[GpuprofError] = []
    for number, (mode, options) in enumerate(_MODES.items()):
        table = directory / f"ncu{number}.csv"
        try:
            output = _run_ncu(binary, [*options, "--metrics", metrics], command, table, time_limit_s, environment)
            counters = parse_ncu_csv(output, "ncu's table")
        except CountersRefusedError:
            raise
        except (InputError, UnavailableError) as error:
            failures.append(error)
            continue
        counters = replace(counters, distinct=mode.endswith("distinct launches"))
        return counters, (*notes, f"counters by {mode}", *(f"not by an earlier mode: {error}" for error in failures))
    raise failures[-1]


def _run_ncu(
    binary: Path,
    options: Sequence[str],
    command: Sequence[str],
    table: Path,
    time_limit_s: float,
    environment: Mapping[str, str] | None,
) -> str:
    """Return the table written by ncu, or without a table ncu's output."""
    # A user's own configuration could change the columns that are parsed.
    fixed = ["--config-file", "off", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    fixed += ["--target-processes", "all", "--nvtx", "--nvtx-include", f"{RUN_RANGE}/"]
    fixed += ["--clock-control", CONDITIONS["clock_control"], "--cache-control", CONDITIONS["cache_control"]]
    # Node by node: a CUDA graph counted as a whole has no kernels.
    fixed += ["--graph-profiling", "node"]

    def explain_refusal(output: str) -> UnavailableError | None:
        return known_failure(output + (read_text(table) if table.exists() else ""))

    whole = [str(binary), *fixed, *options, *command]
    output = run_tool(whole, time_limit_s=time_limit_s, environment=environment, explain=explain_refusal)
    return (read_text(table) if table.exists() else "") or output


@cache
def _list_metrics(binary: Path) -> frozenset[str]:
    """Return the names of this machine's GPU counters, which takes ncu seconds; empty if not reported."""
    return listed_metrics(ask_tool([str(binary), "--query-metrics"]) or "")
