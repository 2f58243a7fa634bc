"""Reads a timeline from Nsight Systems: the SQLite file of ``nsys export``, or the CSV of ``nsys stats``.

SQLite tables exist only for recorded event kinds, and columns differ between versions of the export schema: nothing is
read by position, and missing columns are left out. A kernel is tied to its launch call by process and correlation id,
the call to a range by thread and time.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.attribution import NO_RANGE, Integers
from gpuprof.profiling.timeline.timeline import (
    D2H,
    H2D,
    OUTSIDE,
    PAGEABLE,
    PINNED,
    UNKNOWN,
    Timeline,
    column,
    empty_frame,
    tie_to_launches,
)

_MAGIC = b"SQLite format 3\x00"
#: The table of metadata in newer exports and in older ones.
_META = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_BLOCK = 65_536
_KIND = "CUPTI_ACTIVITY_KIND_"
_KERNELS, _CALLS = f"{_KIND}KERNEL", (f"{_KIND}RUNTIME", f"{_KIND}DRIVER")
_COPIES, _MEMSETS, _GRAPHS, _RANGES = f"{_KIND}MEMCPY", f"{_KIND}MEMSET", f"{_KIND}GRAPH_TRACE", "NVTX_EVENTS"
#: Columns of every event on a device, then those of each kind of event.
_EVENT = {
    "start": "start_ns",
    "end": "end_ns",
    "deviceId": "device_index",
    "globalPid": "global_pid",
    "streamId": "stream_id",
    "correlationId": "correlation_id",
}
_KERNEL_COLUMNS = {
    **_EVENT,
    "demangledName": "name_id",
    "shortName": "short_name_id",
    **{f"{part}{axis.upper()}": f"{part}_{axis}" for part in ("grid", "block") for axis in "xyz"},
    "registersPerThread": "registers_per_thread",
    "staticSharedMemory": "static_shared_bytes",
    "dynamicSharedMemory": "dynamic_shared_bytes",
    "graphNodeId": "graph_node",
}
_CALL_COLUMNS = {
    "start": "launch_start_ns",
    "end": "launch_end_ns",
    "globalTid": "global_tid",
    "correlationId": "correlation_id",
}
_COPY_COLUMNS = {**_EVENT, "bytes": "bytes", "copyKind": "kind", "srcKind": "from_memory", "dstKind": "to_memory"}
_RANGE_COLUMNS = {
    "start": "start_ns",
    "end": "end_ns",
    "eventType": "kind",
    "text": "text",
    "textId": "text_id",
    "globalTid": "global_tid",
}
#: ``TARGET_INFO_GPU`` in newer exports: the clock is in Hz, the bandwidth in bytes per second.
_GPU_COLUMNS = {
    "smCount": "sms",
    "totalMemory": "memory_bytes",
    "memoryBandwidth": "memory_bytes_per_s",
    "clockRate": "clock_hz",
    "l2CacheSize": "l2_bytes",
    "maxWarpsPerSm": "warps_per_sm",
    "maxRegistersPerSm": "registers_per_sm",
    "maxShmemPerSm": "shared_bytes_per_sm",
    "maxShmemPerBlockOptin": "shared_bytes_per_block",
}
#: NVTX_EVENTS.eventType (nsys's ENUM_NSYS_EVENT_TYPE): push/pop ranges of a thread, and start/end ranges across
#: threads.
_PUSH_POP, _START_END = 59, 60
#: CUpti_ActivityMemcpyKind: 3 to 7 are of CUDA arrays, 11 to 13 are migrations of unified memory.
_DIRECTIONS = {
    **dict.fromkeys((1, 3, 11), H2D),
    **dict.fromkeys((2, 4, 12), D2H),
    **dict.fromkeys((5, 6, 7, 8, 13), "d2d"),
    9: "h2h",
    10: "p2p",
}
_UNIFIED = (11, 12, 13)
_MEMORIES = {0: PAGEABLE, 1: PINNED}  # nsys's own ENUM_CUDA_MEM_KIND, which counts otherwise than CUPTI's
# A global id is made of hardware, machine, process and thread: 8, 8, 24 and 24 bits.
_THREAD_BITS, _ID_MASK = 24, (1 << 24) - 1
_TO_THE_END = np.iinfo(np.int64).max
_GRAPH_FIX = "record again with --cuda-graph-trace=node"
_EXPORT_FIX = "nsys export --type=sqlite REPORT.nsys-rep writes one"
#: Tables that describe the report or the machine, or hold host activity irrelevant to all figures.
_DESCRIPTIVE = re.compile(
    "StringIds|ENUM_.*|META_DATA_.*|EXPORT_META_DATA|TARGET_INFO_.*|ThreadNames|ProcessStreams|PROCESSES|sqlite_.*"
    "|ANALYSIS_.*|DIAGNOSTIC_.*|PROFILER_OVERHEAD|CUDA_CALLCHAINS|NVTX_PAYLOAD_.*|NVTX_COUNTER_.*"
    f"|{_KIND}SYNCHRONIZATION|{_KIND}CUDA_EVENT|SCHED_EVENTS|COMPOSITE_EVENTS|OSRT_.*"
)


def read_nsys(path: Path, expect_kernels: bool = True) -> Timeline:
    """Return the timeline of a report written by ``nsys export --type=sqlite``.

    ``expect_kernels``: False for a program without a GPU: a report without kernels is then an empty timeline. Raises
    `InputError` when the file is not such a report, is truncated, or lacks the expected kernels, with the reason.
    """
    tables = _Tables(path)
    with closing(tables.connection):
        try:
            tables.read_catalogue()
            return _read_timeline(tables, expect_kernels)
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path} is cut off or damaged: {error}", "export the report again") from error


class _Tables:
    """A SQLite file of Nsight Systems; raises `InputError` for an unreadable or other file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(len(_MAGIC))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        if head != _MAGIC:
            raise InputError(f"{path} is not a SQLite file", _EXPORT_FIX)
        # Immutable: SQLite takes no lock and looks for no journal, so reports on a read-only disk open too.
        self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        self.columns: dict[str, tuple[str, ...]] = {}
        self.version = "unknown"

    def read_catalogue(self) -> None:
        """Read the list of tables, and the versions of tool and schema."""
        listed = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in listed:
            self.columns[name] = tuple(row[1] for row in self.connection.execute(f'PRAGMA table_info("{name}")'))
        table = next((name for name in _META if {"name", "value"} <= set(self.columns.get(name, ()))), None)
        if table is None:
            raise InputError(f"{self.path} is a SQLite file, but not one that nsys export wrote", _EXPORT_FIX)
        about = dict(self.connection.execute(f'SELECT name, value FROM "{table}"').fetchall())
        product, schema = (about.get(f"EXPORT_{part}_VERSION", "unknown") for part in ("PRODUCT", "SCHEMA"))
        self.version = f"{product} (schema {schema})"

    def has(self, table: str, *columns: str) -> bool:
        """Return whether the table was recorded with these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def read(
        self, table: str, wanted: Mapping[str, str], needed: Sequence[str] = (), present: Sequence[str] = ()
    ) -> pd.DataFrame:
        """Return the existing columns of ``table``.

        Raises `InputError` when a needed column is missing. ``wanted``: column of the file → its name in the result;
        ``present``: columns whose null rows are left out.
        """
        there = [name for name in wanted if name in self.columns[table]]
        if missing := [name for name in needed if name not in there]:
            raise InputError(
                f"{self.path}: {table} of Nsight Systems {self.version} has no column {missing[0]}",
                "a version of nsys that gpuprof does not know: report it",
            )
        listed = ", ".join(f'"{name}"' for name in there)
        condition = " AND ".join(f'"{name}" IS NOT NULL' for name in present if name in there) or "1"
        cursor = self.connection.execute(f'SELECT {listed} FROM "{table}" WHERE {condition}')
        # Blocks of rows are converted to columns: whole tables as Python rows would take ten times as long.
        blocks: list[list[Any]] = [[] for _ in there]
        while rows := cursor.fetchmany(_BLOCK):
            for block, values in zip(blocks, zip(*rows, strict=True), strict=True):
                block.append(_to_array(values))
        arrays = [np.concatenate(block) if block else np.zeros(0, dtype=np.int64) for block in blocks]
        return pd.DataFrame(dict(zip((wanted[name] for name in there), arrays, strict=True)))


def _to_array(values: tuple[Any, ...]) -> Any:
    try:
        return np.array(values, dtype=np.int64 if isinstance(values[0], int) else object)
    except (TypeError, ValueError, OverflowError):  # nulls or text in between
        return np.array(values, dtype=object)


def _read_timeline(tables: _Tables, expect_kernels: bool) -> Timeline:
    if expect_kernels and not tables.has(_KERNELS):
        raise _no_kernels_error(tables)
    strings: dict[int, str] = {}
    if tables.has("StringIds", "id", "value"):
        strings = dict(tables.connection.execute("SELECT id, value FROM StringIds").fetchall())
    ranges = _read_ranges(tables, strings)
    calls = _read_calls(tables)
    gpus, indices = _read_gpus(tables)

    def read_events(table: str, columns: Mapping[str, str], *needed: str) -> pd.DataFrame:
        """Return the events of a table, tied to their launches, on the GPUs that their processes saw."""
        if not tables.has(table):
            return empty_frame("start_ns", "duration_ns", "repeat")
        frame = tables.read(table, columns, ("start", "end", *needed)).sort_values("start_ns", kind="stable")
        process = _split_global_ids(frame["global_pid"])[0] if "global_pid" in frame else np.int64(0)
        frame = frame.reset_index(drop=True).assign(
            duration_ns=frame["end_ns"].to_numpy() - frame["start_ns"].to_numpy(), process_id=process
        )
        if "device_index" in frame:
            pairs = zip(frame["process_id"].tolist(), frame["device_index"].tolist(), strict=True)
            frame["device_index"] = [indices.get(pair, indices.get((None, pair[1]), pair[1])) for pair in pairs]
        if "correlation_id" in frame:
            frame["correlation_id"] = frame["correlation_id"].fillna(NO_RANGE).astype(np.int64)
        frame = tie_to_launches(frame, calls, ranges, ("process_id", "correlation_id"))
        return frame.drop(columns=[name for name in ("global_pid", "end_ns") if name in frame])

    kernels = _name_kernels(read_events(_KERNELS, _KERNEL_COLUMNS), strings, tables)
    graphs = read_events(_GRAPHS, _EVENT)
    return Timeline(
        kernels=kernels,
        copies=_describe_copies(read_events(_COPIES, _COPY_COLUMNS, "bytes", "copyKind")),
        memsets=read_events(_MEMSETS, {**_EVENT, "bytes": "bytes"}),
        graphs=graphs,
        ranges=ranges,
        tool="nsys",
        version=tables.version,
        gpus=gpus,
        notes=_make_notes(tables, kernels, graphs),
        epoch_ns=_read_epoch(tables),
    )


def _no_kernels_error(tables: _Tables) -> InputError:
    if tables.has(_GRAPHS):
        return InputError(f"{tables.path} has CUDA graphs as wholes and no kernels of them", _GRAPH_FIX)
    if tables.has(_CALLS[0]):
        return InputError(
            f"{tables.path} has CUDA calls but no kernel", f"if the program launched CUDA graphs, {_GRAPH_FIX}"
        )
    return InputError(f"{tables.path} has no kernel and no CUDA call", "record with -t cuda,nvtx, on a GPU")


def _make_notes(tables: _Tables, kernels: pd.DataFrame, graphs: pd.DataFrame) -> tuple[str, ...]:
    notes = []
    untied = int((column(kernels, "thread_id") == NO_RANGE).sum())
    if not len(kernels):
        notes.append("no kernels: nothing ran on a GPU")
    if untied:
        notes.append(f"{untied} of {len(kernels)} kernels have no launch call in the report")
    if len(graphs):
        graph_ms, kernel_ms = (float(table["duration_ns"].sum()) / 1e6 for table in (graphs, kernels))
        notes.append(
            f"{len(graphs)} CUDA graphs were recorded as wholes, {graph_ms:.4g} of {graph_ms + kernel_ms:.4g} ms "
            f"on the GPU: their kernels are not in the report; {_GRAPH_FIX}"
        )
    read = {_KERNELS, *_CALLS, _COPIES, _MEMSETS, _GRAPHS, _RANGES}
    unread = sorted(name for name in tables.columns if name not in read and not _DESCRIPTIVE.fullmatch(name))
    if unread:
        notes.append(f"tables of the report that are not read: {', '.join(unread)}")
    return tuple(notes)


def _read_epoch(tables: _Tables) -> int | None:
    """Return the Unix time of the report clock's zero, as included in newer exports."""
    table = "TARGET_INFO_SESSION_START_TIME"
    if not tables.has(table, "utcEpochNs"):
        return None
    row = tables.connection.execute(f"SELECT utcEpochNs FROM {table} LIMIT 1").fetchone()
    return int(row[0]) if row and row[0] is not None else None


def _read_ranges(tables: _Tables, strings: Mapping[int, str]) -> pd.DataFrame:
    if not tables.has(_RANGES):
        return empty_frame("name", "start_ns", "end_ns", "process_id", "thread_id")
    frame = tables.read(_RANGES, _RANGE_COLUMNS, ("start", "end", "eventType", "globalTid"), ("globalTid",))
    frame = frame[frame["kind"].isin([_PUSH_POP, _START_END])].reset_index(drop=True)
    process, thread = _split_global_ids(frame["global_tid"])
    texts = zip(column(frame, "text").tolist(), column(frame, "text_id").tolist(), strict=True)
    return pd.DataFrame(
        {
            "name": [text if isinstance(text, str) else strings.get(text_id, "") for text, text_id in texts],
            "start_ns": frame["start_ns"].to_numpy(dtype=np.int64),
            # A range that was never left lies open to the end; floats would lose nanoseconds.
            "end_ns": np.array([_TO_THE_END if pd.isna(end) else int(end) for end in frame["end_ns"]], dtype=np.int64),
            "process_id": process,
            "thread_id": thread,
        }
    )


def _read_calls(tables: _Tables) -> pd.DataFrame:
    """Return each call's start and thread under the process and correlation id that its kernels carry."""
    names = tuple(_CALL_COLUMNS)
    parts = [tables.read(table, _CALL_COLUMNS, names, names) for table in _CALLS if tables.has(table)]
    frame = pd.concat(parts) if parts else pd.DataFrame(columns=list(_CALL_COLUMNS.values()), dtype=np.int64)
    process, thread = _split_global_ids(frame["global_tid"])
    return frame.drop(columns="global_tid").assign(process_id=process, thread_id=thread)


def _name_kernels(kernels: pd.DataFrame, strings: Mapping[int, str], tables: _Tables) -> pd.DataFrame:
    ids = next((name for name in ("name_id", "short_name_id") if name in kernels), None)
    if ids is None:
        if len(kernels):
            raise InputError(f"{tables.path}: kernels have no names", "a version of nsys that gpuprof does not know")
        return kernels.assign(name=pd.Series(dtype="object"))
    names = kernels[ids].map(strings).fillna("unknown")
    return kernels.assign(name=names).drop(columns=[name for name in ("name_id", "short_name_id") if name in kernels])


def _describe_copies(copies: pd.DataFrame) -> pd.DataFrame:
    """Add each copy's direction, and the kind of host memory, if any."""
    if "kind" not in copies:
        return empty_frame("start_ns", "duration_ns", "bytes", "direction", "memory", "repeat")
    direction = copies["kind"].map(_DIRECTIONS).fillna(UNKNOWN)
    source, target = (column(copies, name).map(_MEMORIES) for name in ("from_memory", "to_memory"))
    memory = source.where(direction == H2D, target.where(direction == D2H, None)).astype("object")
    return copies.assign(direction=direction, memory=memory.mask(copies["kind"].isin(_UNIFIED), "unified"))


def _read_gpus(tables: _Tables) -> tuple[dict[int, GpuDescription], dict[tuple[int | None, int], int]]:
    """Return the description of each GPU by its id, and (process, CUDA's index) → id.

    A kernel's index is CUDA's index within its process, possibly renumbered by ``CUDA_VISIBLE_DEVICES``. A software
    adapter has no SMs and runs no kernel.
    """
    if not tables.has("TARGET_INFO_GPU", "id", "name"):
        return {}, {}
    names = {"id": "id", "cuDevice": "cuda", "name": "name", "computeMajor": "major", "computeMinor": "minor"}
    rows = tables.read("TARGET_INFO_GPU", {**names, **_GPU_COLUMNS}).to_dict("records")
    gpus, indices = {}, dict[tuple[int | None, int], int]()
    for row in rows:
        version = (row.get("major"), row.get("minor"))
        if row.get("sms") == 0 or (version[0] == 0 and version[1] == 0):
            continue
        described = {name: row[name] for name in _GPU_COLUMNS.values() if row.get(name)}
        clock = described.pop("clock_hz", None)
        gpu = int(row["id"])
        gpus[gpu] = GpuDescription(
            str(row["name"]),
            compute_capability=None if None in version else f"{int(version[0])}.{int(version[1])}",  # type: ignore[arg-type]
            clock_mhz=clock / 1e6 if clock else None,
            **described,
        )
        if row.get("cuda") is not None:
            indices.setdefault((None, int(row["cuda"])), gpu)
    if tables.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId"):
        frame = tables.read("TARGET_INFO_CUDA_DEVICE", {"gpuId": "gpu", "cudaId": "cuda", "pid": "process"})
        for row in frame.to_dict("records"):
            if int(row["gpu"]) in gpus:
                process = None if pd.isna(row.get("process")) else int(row["process"])
                indices[process, int(row["cuda"])] = int(row["gpu"])
    return gpus, indices


def _split_global_ids(global_ids: pd.Series[Any]) -> tuple[Integers, Integers]:
    ids = global_ids.fillna(0).to_numpy(dtype=np.int64)
    return ids >> _THREAD_BITS & _ID_MASK, ids & _ID_MASK


#: First columns of the trace of kernels and copies that ``nsys stats`` prints, before 2023.1 by another name.
_TRACE_HEAD = re.compile(r'^"?Start \((?P<unit>\w+)\)"?,"?Duration \(\w+\)"?,"?CorrId"?', re.MULTILINE)
_TRACE_FIX = "nsys stats --report cuda_gpu_trace --format csv REPORT prints one (gputrace before 2023.1)"
_TIMES_NS = {"ns": 1.0, "nsec": 1.0, "us": 1e3, "μs": 1e3, "usec": 1e3, "ms": 1e6, "msec": 1e6, "s": 1e9, "sec": 1e9}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_CSV_KERNEL = {
    **{f"Grd{axis.upper()}": f"grid_{axis}" for axis in "xyz"},
    **{f"Blk{axis.upper()}": f"block_{axis}" for axis in "xyz"},
    "Reg/Trd": "registers_per_thread",
    "StcSMem": "static_shared_bytes",
    "DymSMem": "dynamic_shared_bytes",
    "Strm": "stream_id",
}
_CSV_GPU = re.compile(r"(?P<name>.*?)\s*\((?P<index>\d+)\)")


def is_nsys_csv(text: str) -> bool:
    """Return whether ``text`` holds a table printed by ``nsys stats``."""
    return (
        _TRACE_HEAD.search(text) is not None
        or re.search(r'^"?Time ?\(%\)"?,"?Total Time', text, re.MULTILINE) is not None
    )


def parse_nsys_csv(text: str, source: str) -> Timeline:
    """Return the timeline in the CSV of the report ``cuda_gpu_trace``; ``source`` names the text in messages.

    The trace has neither calls nor ranges: runs are selected by their number. Raises `InputError` for another report,
    or an unreadable number.
    """
    start = _TRACE_HEAD.search(text)
    if start is None:
        raise InputError(f"{source} is a summary: it has no kernel by itself", _TRACE_FIX)
    reader = csv.reader(io.StringIO(text[start.start() :]))
    units = [re.fullmatch(r"(.*?)(?: \((.*)\))?", title.strip()) for title in next(reader)]
    heads = [(match[1], match[2] or "") for match in units if match]
    kernels, copies, memsets = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    gpus: dict[int, GpuDescription] = {}
    for line in reader:
        if len(line) != len(heads):
            if any(line):
                raise InputError(f"{source}: a row has {len(line)} of {len(heads)} columns", "is the file cut off?")
            break  # another report may follow
        cells = {name: (cell.strip(), unit) for (name, unit), cell in zip(heads, line, strict=True)}
        name = cells["Name"][0]
        try:
            event: dict[str, Any] = {
                "start_ns": round(_csv_number(cells["Start"], _TIMES_NS)),
                "duration_ns": round(_csv_number(cells["Duration"], _TIMES_NS)),
                "repeat": OUTSIDE,
            }
            if gpu := _CSV_GPU.fullmatch(cells["Device"][0] if "Device" in cells else ""):
                event["device_index"] = int(gpu["index"])
                gpus.setdefault(int(gpu["index"]), GpuDescription(gpu["name"]))
            if name.startswith("[CUDA memset"):
                memsets.append(event)
            elif name.startswith("[CUDA"):
                copies.append({**event, **_csv_copy(name, cells)})
            else:
                given = {to: cells[head] for head, to in _CSV_KERNEL.items() if head in cells and cells[head][0]}
                sizes = {to: round(_csv_number(cell, _BYTES)) for to, cell in given.items()}
                kernels.append({"name": name, **event, **sizes})
        except (KeyError, ValueError) as error:
            raise InputError(f"{source}: cannot read a row of {name}: {error}", _TRACE_FIX) from None
    if not kernels:
        raise InputError(f"{source} has no kernel", _TRACE_FIX)
    timeline = Timeline(
        kernels=pd.DataFrame(kernels).sort_values("start_ns", kind="stable").reset_index(drop=True),
        tool="nsys",
        version="CSV",
        gpus=gpus,
    )
    copied = pd.DataFrame(copies) if copies else timeline.copies
    return replace(timeline, copies=copied, memsets=pd.DataFrame(memsets) if memsets else timeline.memsets)


def _csv_number(cell: tuple[str, str], units: Mapping[str, float]) -> float:
    return float(cell[0].replace(",", "")) * units.get(cell[1], 1.0)


def _csv_copy(name: str, cells: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    plain = name.replace("Host-to-Device", "HtoD").replace("Device-to-Host", "DtoH").replace("Device-to-Device", "DtoD")
    direction = next((said for word, said in (("HtoD", H2D), ("DtoH", D2H), ("DtoD", "d2d")) if word in plain), UNKNOWN)
    kinds = {cells[head][0].lower() for head in ("SrcMemKd", "DstMemKd") if head in cells}
    memory = next((kind for kind in (PINNED, PAGEABLE) if kind in kinds), "unified" if "Unified" in name else None)
    return {"bytes": round(_csv_number(cells["Bytes"], _BYTES)), "direction": direction, "memory": memory}
