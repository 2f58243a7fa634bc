"""Reads what Nsight Compute counted of each kernel: its CSV, or its own file through the package that comes with it.

Both kinds of CSV are read: ``--page raw``, a row for each kernel with its units in the second row, and the default, a
row for each metric of each kernel.
"""

from __future__ import annotations

import csv
import importlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.profiling.nsight.ncu_metrics import column_of, in_column_unit, number_of
from gpuprof.profiling.nsight.tool_process import find_tool, run_tool
from gpuprof.profiling.timeline.timeline import column as column_or_nulls

_MAX_BYTES = 2 * 2**30
_IMPORT_S = 600.0
_SHAPE = re.compile(r"\(?\s*(\d+),\s*(\d+),\s*(\d+)\s*\)?")
_ID, _NAME, _PROCESS, _STREAM = "ID", "Kernel Name", "Process ID", "Stream"
_LONG = ("Metric Name", "Metric Unit", "Metric Value")
_DEVICE, _RULE, _ATTRIBUTE = "Device", ("Rule ", "Estimated Speedup"), "device__attribute_"
_GPU = f"{_ATTRIBUTE}display_name"
_CSV_FIX = "ncu --import REPORT --csv --page raw --print-units base writes one"
_COUNTERS_FIX = (
    "on the host set NVreg_RestrictProfilingToAdminUsers=0 and reboot, or start the container with "
    "--cap-add=SYS_ADMIN; nothing inside the container cures it, timing works without"
)
#: What ncu says when it cannot work → the rule and the fix.
_FAILURES: Mapping[str, tuple[str, str]] = {
    "ERR_NVGPUCTRPERM": ("ncu may not read this GPU's counters (ERR_NVGPUCTRPERM)", _COUNTERS_FIX),
    "driver resource was unavailable": (
        "another profiler holds this GPU's counters (a driver resource was unavailable)",
        "end it, or where it is DCGM: dcgmi profile --pause",
    ),
    "No kernels were profiled": ("ncu saw no kernel", "does the program launch any in the range that was asked for?"),
}


@dataclass(frozen=True)
class Counters:
    """What was counted."""

    #: ``name``, ``process_id``, ``stream_id``, and the columns of `ncu_metrics` that were counted, NaN where one kernel
    #: has none; in the order of launch.
    kernels: pd.DataFrame
    #: Device index → what the report says of the GPU, where it has its attributes; kernels have ``device_index`` where
    #: the report does.
    gpus: Mapping[int, GpuDescription] = field(default_factory=dict)

    def by_gpu(self) -> dict[int, Counters]:
        """Return the counters of each GPU by its index; of one alone the whole."""
        index = pd.to_numeric(column_or_nulls(self.kernels, "device_index"), errors="coerce").fillna(0).astype(np.int64)
        used = sorted(index.unique().tolist())
        if len(used) <= 1:
            return {int(used[0]) if used else 0: self}
        return {
            int(gpu): Counters(
                self.kernels[(index == gpu).to_numpy()].reset_index(drop=True),
                {gpu: self.gpus[gpu]} if gpu in self.gpus else {},
            )
            for gpu in used
        }


def known_failure(printed: str) -> GpuprofError | None:
    """Return the error for what ncu printed, where it is one that people can mend."""
    for words, (rule, fix) in _FAILURES.items():
        if words in printed:
            return UnavailableError(rule, fix)
    return None


def read_ncu_csv(path: Path) -> Counters:
    """Return the counters in a CSV that ncu wrote, with whatever else was printed around it.

    Raises `InputError` when it holds no such table, is cut off in the middle of a row, or has numbers or units of
    another kind; `UnavailableError` when it holds ncu's complaint instead.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES >> 30} GiB", "profile fewer kernels")
        return parse_ncu_csv(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def parse_ncu_csv(text: str, source: str) -> Counters:
    """Return the counters in ``text``; ``source`` names it in messages.

    Raises `InputError` or `UnavailableError` as `read_ncu_csv` does.
    """
    rows = list(_list_rows(text, source))
    header, body = rows[0], rows[1:]
    long = all(name in header for name in _LONG)
    try:
        counters = _read_long(header, body) if long else _read_wide(header, body)
    except InputError as error:
        raise InputError(f"{source}: {error.message}", error.fix) from None
    if not len(counters.kernels):
        raise InputError(f"{source} has no kernel", "was any launched in the range that was asked for?")
    return counters


def read_ncu_rep(path: Path) -> Counters:
    """Return the counters in an ``.ncu-rep`` file, through the package ``ncu_report`` or else through ``ncu --import``.

    Raises `InputError` when it is no such report; `UnavailableError` when neither is installed.
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
    except Exception as error:  # the package raises whatever its C++ code does
        raise InputError(f"{path} is not a report of Nsight Compute: {error}") from error


def _import_with_ncu(path: Path) -> Counters:
    binary = find_tool("ncu")
    if binary is None:
        raise UnavailableError(
            f"{path} needs Nsight Compute to be read: neither ncu nor the package ncu_report is installed",
            f"pip install ncu-report, or on a machine with Nsight Compute, {_CSV_FIX}",
        )
    command = [str(binary), "--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]

    def explain_refusal(printed: str) -> GpuprofError:
        return InputError(f"ncu cannot read {path}: {(printed.strip().splitlines() or ['it does not say why'])[-1]}")

    with tempfile.TemporaryDirectory(prefix="gpuprof-") as directory:
        log = Path(directory) / "import.csv"
        return parse_ncu_csv(
            run_tool(command, log=log, time_limit_s=_IMPORT_S, explain=explain_refusal).printed, str(path)
        )


def _list_rows(text: str, source: str) -> Iterator[list[str]]:
    """Yield the table's rows, header first; other lines were printed by other programs."""
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
        left_out = header[len(row) :]
        if line.count('"') % 2 or len(row) > len(header) or not all(name.startswith(_RULE) for name in left_out):
            raise InputError(f"{source}:{first} is not a whole row of {len(header)} columns", "is the file cut off?")
        yield [*row, *[""] * len(left_out)]


def _read_wide(header: Sequence[str], body: Sequence[Sequence[str]]) -> Counters:
    units = dict(zip(header, body[0], strict=True)) if body and not body[0][header.index(_ID)] else {}
    rows = body[1:] if units else body
    metrics = column_of(header)
    kernels = []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        values = {metric: (cells[metric], units.get(metric, "")) for metric in metrics}
        kernels.append({**_read_launch(cells), **_convert_values(values, metrics)})
    launches = [dict(zip(header, row, strict=True)) for row in rows]
    return Counters(pd.DataFrame(kernels), _describe_gpus([(_read_device(launch), launch) for launch in launches]))


def _read_long(header: Sequence[str], body: Sequence[Sequence[str]]) -> Counters:
    launches: dict[tuple[str, str], dict[str, str]] = {}
    values: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for row in body:
        cells = dict(zip(header, row, strict=True))
        key = (cells.get(_PROCESS, ""), cells[_ID])
        launches.setdefault(key, cells)
        name, unit, value = (cells[part] for part in _LONG)
        values.setdefault(key, {})[name] = (value, unit)
    metrics = column_of({name for found in values.values() for name in found})
    if not metrics:
        raise InputError("none of its metrics is one that gpuprof keeps", f"{_CSV_FIX} with their own")
    described = [
        (_read_device(cells), {name: value for name, (value, _) in values[key].items()})
        for key, cells in launches.items()
    ]
    return Counters(
        pd.DataFrame([{**_read_launch(launches[key]), **_convert_values(values[key], metrics)} for key in launches]),
        _describe_gpus(described),
    )


def _read_device(cells: Mapping[str, str]) -> int:
    return int(number_of(cells.get(_DEVICE, "")) or 0)


def _describe_gpus(launches: Sequence[tuple[int, Mapping[str, str]]]) -> dict[int, GpuDescription]:
    """Return what a report says of each GPU: by its attributes, which stand with each launch."""
    gpus: dict[int, GpuDescription] = {}
    for index, values in launches:
        if index in gpus or not values.get(_GPU):
            continue
        numbers = {name: number_of(values[name]) for name in values if name.startswith(_ATTRIBUTE) and name != _GPU}
        gpus[index] = _describe_gpu(values[_GPU], numbers)
    return gpus


def _describe_gpu(name: str, numbers: Mapping[str, float | None]) -> GpuDescription:
    """Return the description in ncu's attributes: clocks are in kHz, the memory's counts both edges."""

    def whole(attribute: str) -> int | None:
        value = numbers.get(f"{_ATTRIBUTE}{attribute}")
        return None if not value else int(value)

    major, minor = (numbers.get(f"{_ATTRIBUTE}compute_capability_{part}") for part in ("major", "minor"))
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


def _read_launch(cells: Mapping[str, str]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "name": cells[_NAME],
        "process_id": int(number_of(cells.get(_PROCESS, "")) or 0),
        "stream_id": int(number_of(cells.get(_STREAM, "")) or 0),
        "device_index": _read_device(cells),
    }
    for title, prefix in (("Grid Size", "grid"), ("Block Size", "block")):
        if match := _SHAPE.fullmatch(cells.get(title, "")):
            columns |= {f"{prefix}_{axis}": int(size) for axis, size in zip("xyz", match.groups(), strict=True)}
    return columns


def _convert_values(values: Mapping[str, tuple[str, str]], metrics: Mapping[str, str]) -> dict[str, float]:
    converted = {}
    for metric, column in metrics.items():
        text, unit = values.get(metric, ("", ""))
        value = number_of(text)
        if value is not None:
            converted[column] = in_column_unit(column, value, unit)
        elif column[:5] not in ("grid_", "block"):
            converted[column] = np.nan
    return converted


def _read_with_package(context: Any, package: Any) -> Counters:
    kernels = []
    gpus: dict[int, GpuDescription] = {}
    for range_index in range(context.num_ranges()):
        part = context.range_by_idx(range_index)
        for action_index in range(part.num_actions()):
            action = part.action_by_idx(action_index)
            names = set(action.metric_names())
            kernel: dict[str, Any] = {"name": _demangle_name(action, package), "process_id": 0, "stream_id": 0}
            for metric, column in column_of(names).items():
                value = action.metric_by_name(metric)
                kernel[column] = in_column_unit(column, float(value.as_double()), str(value.unit() or ""))
            if _GPU in names and 0 not in gpus:
                numbers = {
                    name: float(action.metric_by_name(name).as_double())
                    for name in names
                    if name.startswith(_ATTRIBUTE) and name != _GPU
                }
                gpus[0] = _describe_gpu(str(action.metric_by_name(_GPU).as_string()), numbers)
            kernels.append(kernel)
    if not kernels:
        raise InputError("the report has no kernel", "was any launched in the range that was asked for?")
    return Counters(pd.DataFrame(kernels), gpus)


def _demangle_name(action: Any, package: Any) -> str:
    base = getattr(package.IAction, "NameBase_DEMANGLED", None)
    return str(action.name() if base is None else action.name(base))
