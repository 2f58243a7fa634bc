"""Records a program with Nsight Systems, and reads a timeline from its reports.

Reports are the SQLite file of ``nsys export``, or the CSV of ``nsys stats``. SQLite tables exist only for recorded
event kinds, and columns differ between versions of the export schema: a column whose source is missing is left out. A
kernel is tied to its launch call by process and correlation id, the call to a range by thread and time.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.profiling.nsight.tool_process import find_tool, run_tool
from gpuprof.profiling.timeline.timeline import (
    D2H,
    H2D,
    NO_RANGE,
    OUTSIDE,
    PAGEABLE,
    PINNED,
    UNKNOWN,
    Timeline,
    column,
    empty_frame,
    read_direction,
    tie_to_launches,
)

_IMPORTER_PLACES = (
    "usr/lib/nsight-systems/host-linux-*/QdstrmImporter",
    "opt/nvidia/nsight-systems*/*/host-linux-*/QdstrmImporter",
)
_INSTALL = "apt-get install nsight-systems (Debian: non-free) or nsight-systems-cli (NVIDIA's repository)"
#: The table of metadata in newer exports and in older ones.
_META = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_KIND = "CUPTI_ACTIVITY_KIND_"
_KERNELS, _CALLS = f"{_KIND}KERNEL", (f"{_KIND}RUNTIME", f"{_KIND}DRIVER")
_COPIES, _MEMSETS, _GRAPHS, _RANGES = f"{_KIND}MEMCPY", f"{_KIND}MEMSET", f"{_KIND}GRAPH_TRACE", "NVTX_EVENTS"
# A global id is made of hardware, machine, process and thread: 8, 8, 24 and 24 bits.
_PROCESS, _THREAD = "{} >> 24 & 0xFFFFFF", "{} & 0xFFFFFF"
#: Columns of every event on a device as SQL, then those of each kind of event. Nulls would turn ids into floats.
_EVENT = {
    "start_ns": '"start"',
    "duration_ns": '"end" - "start"',
    "device_index": 'COALESCE("deviceId", 0)',
    "process_id": _PROCESS.format('COALESCE("globalPid", 0)'),
    "stream_id": '"streamId"',
    "correlation_id": f'COALESCE("correlationId", {NO_RANGE})',
}
_KERNEL = {
    **_EVENT,
    "name_id": '"demangledName"',
    "short_name_id": '"shortName"',
    **{f"{part}_{axis}": f'"{part}{axis.upper()}"' for part in ("grid", "block") for axis in "xyz"},
    "registers_per_thread": '"registersPerThread"',
    "static_shared_bytes": '"staticSharedMemory"',
    "dynamic_shared_bytes": '"dynamicSharedMemory"',
    "graph_node": '"graphNodeId"',
}
_CALL = {
    "launch_start_ns": '"start"',
    "launch_end_ns": '"end"',
    "correlation_id": '"correlationId"',
    "process_id": _PROCESS.format('"globalTid"'),
    "thread_id": _THREAD.format('"globalTid"'),
}
_BYTES = {**_EVENT, "bytes": '"bytes"'}
_COPY = {**_BYTES, "kind": '"copyKind"', "from_memory": '"srcKind"', "to_memory": '"dstKind"'}
_RANGE = {
    "text": '"text"',
    "text_id": '"textId"',
    "start_ns": '"start"',
    # A range that was never left lies open to the end.
    "end_ns": f'COALESCE("end", {np.iinfo(np.int64).max})',
    "process_id": _PROCESS.format('"globalTid"'),
    "thread_id": _THREAD.format('"globalTid"'),
}
#: Push/pop ranges of a thread, and start/end ranges across threads (nsys's ENUM_NSYS_EVENT_TYPE).
_IS_RANGE = '"eventType" IN (59, 60) AND "globalTid" IS NOT NULL'
#: ``TARGET_INFO_GPU`` in newer exports: the clock is in Hz, the bandwidth in bytes per second.
_GPU = {
    "sms": '"smCount"',
    "memory_bytes": '"totalMemory"',
    "memory_bytes_per_s": '"memoryBandwidth"',
    "clock_mhz": '"clockRate" / 1e6',
    "l2_bytes": '"l2CacheSize"',
    "warps_per_sm": '"maxWarpsPerSm"',
    "registers_per_sm": '"maxRegistersPerSm"',
    "shared_bytes_per_sm": '"maxShmemPerSm"',
    "shared_bytes_per_block": '"maxShmemPerBlockOptin"',
    "compute_capability": '"computeMajor" || \'.\' || "computeMinor"',
}
#: CUpti_ActivityMemcpyKind: 3 to 7 are of CUDA arrays, 11 to 13 are migrations of unified memory.
_DIRECTIONS = {
    **dict.fromkeys((1, 3, 11), H2D),
    **dict.fromkeys((2, 4, 12), D2H),
    **dict.fromkeys((5, 6, 7, 8, 13), "d2d"),
    9: "h2h",
    10: "p2p",
}
_MEMORIES = {0: PAGEABLE, 1: PINNED}  # nsys's own ENUM_CUDA_MEM_KIND, which counts otherwise than CUPTI's
#: Columns of texts, and a number that no other column reaches.
_TEXTS, _TOO_LARGE = ["text", "name", "compute_capability"], 2.0**62
_GRAPH_FIX = "record again with --cuda-graph-trace=node"
_EXPORT_FIX = "nsys export --type=sqlite REPORT.nsys-rep writes one"
#: Tables that describe the report or the machine, or hold host activity irrelevant to all figures.
_DESCRIPTIVE = re.compile(
    "StringIds|ENUM_.*|META_DATA_.*|EXPORT_META_DATA|TARGET_INFO_.*|ThreadNames|ProcessStreams|PROCESSES|sqlite_.*"
    "|ANALYSIS_.*|DIAGNOSTIC_.*|PROFILER_OVERHEAD|CUDA_CALLCHAINS|NVTX_PAYLOAD_.*|NVTX_COUNTER_.*"
    f"|{_KIND}SYNCHRONIZATION|{_KIND}CUDA_EVENT|SCHED_EVENTS|COMPOSITE_EVENTS|OSRT_.*"
)


def record_program(
    command: Sequence[str],
    report: Path,
    *,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Run ``command`` under ``nsys profile`` and return the report's path.

    Raises `UnavailableError` when nsys is missing, fails, takes too long or leaves no report. ``report``: path without
    an ending. CUDA graphs are recorded node by node: nsys's own default hides their kernels.
    """
    binary = _require_nsys()
    # Sampling of the CPU and of context switches is off: it needs privileges and slows the program down.
    options = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    options += ["--trace=cuda,nvtx", "--cuda-graph-trace=node"]
    whole = [str(binary), "profile", *options, "-o", str(report), *command]
    output = run_tool(whole, time_limit_s=time_limit_s, environment=environment)
    paths = [report.with_name(report.name + ending) for ending in (".nsys-rep", ".qdrep", ".qdstrm")]
    for path in paths:
        if path.is_file():
            return path
    raise UnavailableError(f"nsys left no report: {output.strip()[-200:]}")


@contextmanager
def export_report(report: Path) -> Iterator[Path]:
    """Yield the SQLite file of a report, removed on exit.

    A raw recording (``.qdstrm``), left by an nsys without its importer, is imported first. Raises `InputError` when the
    report is missing, or refused by nsys; `UnavailableError` when nsys or its importer is missing or hangs.
    """
    if not report.is_file():
        raise InputError(f"cannot read {report}: no such file")
    binary = _require_nsys()
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
        directory = Path(name)
        if report.suffix == ".qdstrm":
            report = _import_recording(report, binary, directory)
        sqlite = directory / "report.sqlite"
        command = [str(binary), "export", "--type=sqlite", "--force-overwrite=true", "-o", str(sqlite), str(report)]
        output = _run_reader(command, report)
        if not sqlite.is_file():
            raise UnavailableError(f"nsys exported nothing of {report}: {output.strip()[-200:]}")
        yield sqlite


def _import_recording(recording: Path, binary: Path, directory: Path) -> Path:
    """Return the report that the host part of nsys makes of a raw recording."""
    places = ("host-linux-*/QdstrmImporter", *_IMPORTER_PLACES)
    roots = binary.resolve().parents
    importer = next((path for root in roots for place in places for path in sorted(root.glob(place))), None)
    if importer is None:
        raise UnavailableError(
            f"{recording} is a raw recording, and nsys's importer is not installed",
            "install nsight-systems-host, or import it on a machine that has it: QdstrmImporter -i FILE",
        )
    report = directory / f"{recording.stem}.nsys-rep"
    _run_reader([str(importer), "-i", str(recording), "-o", str(report)], recording)
    return report


def _run_reader(command: Sequence[str], report: Path) -> str:
    """Run a program that reads a report; a refused report is an input error."""

    def explain_refusal(output: str) -> GpuprofError:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "invalid" in line.lower()]
        return InputError(
            f"{Path(command[0]).name} cannot read {report}: {(telling or lines or ['it does not say why'])[-1]}",
            "is it whole, and of a version that is not newer?",
        )

    return run_tool(command, explain=explain_refusal)


def _require_nsys() -> Path:
    binary = find_tool("nsys")
    if binary is None:
        raise UnavailableError("nsys is not installed", _INSTALL)
    return binary


def read_nsys(path: Path) -> Timeline:
    """Return the timeline of a report written by ``nsys export --type=sqlite``.

    Raises `InputError` when the file is not such a report, is truncated, or has no kernels, with the reason.
    """
    try:
        with path.open("rb") as file:
            if file.read(16) != b"SQLite format 3\x00":
                raise InputError(f"{path} is not a SQLite file", _EXPORT_FIX)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    # Immutable: SQLite takes no lock and looks for no journal, so reports on a read-only disk open too.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        try:
            return _read_timeline(_Tables(path, connection))
        except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
            raise InputError(f"{path} is cut off or damaged: {error}", "export the report again") from error


class _Tables:
    """A SQLite file of Nsight Systems; raises `InputError` for another SQLite file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self.columns: dict[str, set[str]] = {}
        for (name,) in self.query("SELECT name FROM sqlite_master WHERE type = 'table'"):
            self.columns[name] = {row[1] for row in self.query(f'PRAGMA table_info("{name}")')}
        table = next((name for name in _META if self.has(name, "name", "value")), None)
        if table is None:
            raise InputError(f"{path} is a SQLite file, but not one that nsys export wrote", _EXPORT_FIX)
        about = dict(self.query(f'SELECT name, value FROM "{table}"'))
        product, schema = (about.get(f"EXPORT_{part}_VERSION", "unknown") for part in ("PRODUCT", "SCHEMA"))
        self.version = f"{product} (schema {schema})"

    def query(self, sql: str) -> list[Any]:
        """Return the rows of a query."""
        return self._connection.execute(sql).fetchall()

    def has(self, table: str, *columns: str) -> bool:
        """Return whether the table was recorded with these columns."""
        return table in self.columns and set(columns) <= self.columns[table]

    def read(
        self, table: str, sources: Mapping[str, str], needed: tuple[str, ...] = (), where: str = "1"
    ) -> pd.DataFrame:
        """Return the columns whose sources exist in ``table``.

        Raises `InputError` when the source of a needed column is missing. ``sources``: column of the result → its SQL.
        """
        present = {}
        for name, sql in sources.items():
            missing = [source for source in re.findall(r'"(\w+)"', sql) if source not in self.columns[table]]
            if missing and name in needed:
                raise InputError(
                    f"{self.path}: {table} of Nsight Systems {self.version} has no column {missing[0]}",
                    "a version of nsys that gpuprof does not know: report it",
                )
            if not missing:
                present[name] = sql
        columns = ", ".join(f'{sql} AS "{name}"' for name, sql in present.items())
        frame = pd.read_sql_query(f'SELECT {columns} FROM "{table}" WHERE {where}', self._connection)
        for name in frame.columns.difference(_TEXTS):
            if frame[name].dtype != np.int64:  # nulls or, in a damaged file, words
                numbers = pd.to_numeric(frame[name], errors="coerce")
                frame[name] = numbers.where(numbers.abs() < _TOO_LARGE)
        return frame


def _read_timeline(tables: _Tables) -> Timeline:
    if not tables.has(_KERNELS):
        raise _no_kernels_error(tables)
    strings = dict(tables.query("SELECT id, value FROM StringIds")) if tables.has("StringIds", "id", "value") else {}
    ranges = _read_ranges(tables, strings)
    tables_of_calls = [
        tables.read(table, _CALL, tuple(_CALL), '"globalTid" IS NOT NULL') for table in _CALLS if tables.has(table)
    ]
    calls = pd.concat(tables_of_calls).dropna().astype(np.int64) if tables_of_calls else empty_frame(*_CALL)
    gpus, indices = _read_gpus(tables)

    def read_events(table: str, columns: Mapping[str, str], *needed: str) -> pd.DataFrame:
        """Return the events of a table, tied to their launches, on the GPUs that their processes saw."""
        if not tables.has(table):
            return empty_frame("start_ns", "duration_ns", "repeat")
        frame = tables.read(table, columns, ("start_ns", "duration_ns", *needed))
        frame = frame.sort_values("start_ns", kind="stable").reset_index(drop=True)
        if "process_id" not in frame:
            frame["process_id"] = np.int64(0)
        if "device_index" in frame:
            pairs = zip(frame["process_id"].tolist(), frame["device_index"].tolist(), strict=True)
            frame["device_index"] = [indices.get(pair, indices.get((None, pair[1]), pair[1])) for pair in pairs]
        return tie_to_launches(frame, calls, ranges, ("process_id", "correlation_id"))

    kernels = _name_kernels(read_events(_KERNELS, _KERNEL), strings, tables)
    graphs = read_events(_GRAPHS, _EVENT)
    epoch = "TARGET_INFO_SESSION_START_TIME"
    epochs = tables.query(f"SELECT utcEpochNs FROM {epoch}") if tables.has(epoch, "utcEpochNs") else []
    return Timeline(
        kernels=kernels,
        copies=_describe_copies(read_events(_COPIES, _COPY, "bytes", "kind")),
        memsets=read_events(_MEMSETS, _BYTES),
        graphs=graphs,
        ranges=ranges,
        tool="nsys",
        version=tables.version,
        gpus=gpus,
        notes=_make_notes(tables, kernels, graphs),
        epoch_ns=next((int(moment) for (moment,) in epochs if moment is not None), None),
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
    if untied:
        notes.append(f"{untied} of {len(kernels)} kernels have no launch call in the report")
    if len(graphs):
        graph_ms, kernel_ms = (float(table["duration_ns"].sum()) / 1e6 for table in (graphs, kernels))
        notes.append(
            f"{len(graphs)} CUDA graphs were recorded as wholes, {graph_ms:.4g} of {graph_ms + kernel_ms:.4g} ms "
            f"on the GPU: their kernels are not in the report; {_GRAPH_FIX}"
        )
    names = {_KERNELS, *_CALLS, _COPIES, _MEMSETS, _GRAPHS, _RANGES}
    unread = sorted(name for name in tables.columns if name not in names and not _DESCRIPTIVE.fullmatch(name))
    if unread:
        notes.append(f"tables of the report that are not read: {', '.join(unread)}")
    return tuple(notes)


def _read_ranges(tables: _Tables, strings: Mapping[int, str]) -> pd.DataFrame:
    names = ("name", "start_ns", "end_ns", "process_id", "thread_id")
    if not tables.has(_RANGES):
        return empty_frame(*names)
    frame = tables.read(_RANGES, _RANGE, names, _IS_RANGE).dropna(subset=list(names[1:]))
    texts = zip(column(frame, "text").tolist(), column(frame, "text_id").tolist(), strict=True)
    range_names = [text if isinstance(text, str) else strings.get(text_id, "") for text, text_id in texts]
    return frame.assign(name=range_names)[list(names)].astype({"name": "object", **dict.fromkeys(names[1:], np.int64)})


def _name_kernels(kernels: pd.DataFrame, strings: Mapping[int, str], tables: _Tables) -> pd.DataFrame:
    ids = next((name for name in ("name_id", "short_name_id") if name in kernels), None)
    if ids is None:
        if len(kernels):
            raise InputError(f"{tables.path}: kernels have no names", "a version of nsys that gpuprof does not know")
        return kernels.assign(name=pd.Series(dtype="object"))
    result = kernels.assign(name=kernels[ids].map(strings).fillna("unknown"))
    return result.drop(columns=["name_id", "short_name_id"], errors="ignore")


def _describe_copies(copies: pd.DataFrame) -> pd.DataFrame:
    """Add each copy's direction, and the kind of host memory, if any."""
    if "kind" not in copies:
        return empty_frame("start_ns", "duration_ns", "bytes", "direction", "memory", "repeat")
    direction = copies["kind"].map(_DIRECTIONS).fillna(UNKNOWN)
    source, target = (column(copies, name).map(_MEMORIES) for name in ("from_memory", "to_memory"))
    memory = source.where(direction == H2D, target.where(direction == D2H, None)).astype("object")
    return copies.assign(direction=direction, memory=memory.mask(copies["kind"].between(11, 13), "unified"))


def _read_gpus(tables: _Tables) -> tuple[dict[int, GpuDescription], dict[tuple[int | None, int], int]]:
    """Return the description of each GPU by its id, and (process, CUDA's index) → id.

    A kernel's index is CUDA's index within its process, possibly renumbered by ``CUDA_VISIBLE_DEVICES``. A software
    adapter has no SMs and runs no kernel.
    """
    if not tables.has("TARGET_INFO_GPU", "id", "name"):
        return {}, {}
    gpus, indices = {}, dict[tuple[int | None, int], int]()
    frame = tables.read("TARGET_INFO_GPU", {"id": '"id"', "cuda": '"cuDevice"', "name": '"name"', **_GPU})
    for row in frame.dropna(subset="id").to_dict("records"):
        if row.get("sms") == 0 or row.get("compute_capability") == "0.0":
            continue
        described = {str(name): _plain_figure(row[name]) for name in _GPU if row.get(name) and not pd.isna(row[name])}
        gpu = int(row["id"])
        gpus[gpu] = GpuDescription(str(row["name"]), **described)
        if "cuda" in row and not pd.isna(row["cuda"]):
            indices.setdefault((None, int(row["cuda"])), gpu)
    if tables.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId"):
        frame = tables.read("TARGET_INFO_CUDA_DEVICE", {"gpu": '"gpuId"', "cuda": '"cudaId"', "process": '"pid"'})
        for row in frame.dropna(subset=["gpu", "cuda"]).to_dict("records"):
            if int(row["gpu"]) in gpus:
                process = None if pd.isna(row.get("process")) else int(row["process"])
                indices[process, int(row["cuda"])] = int(row["gpu"])
    return gpus, indices


def _plain_figure(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: First columns of the trace of kernels and copies that ``nsys stats`` prints, before 2023.1 by another name.
_TRACE_HEAD = re.compile(r'^"?Start \((?P<unit>\w+)\)"?,"?Duration \(\w+\)"?,"?CorrId"?', re.MULTILINE)
_TRACE_FIX = "nsys stats --report cuda_gpu_trace --format csv REPORT prints one (gputrace before 2023.1)"
_TIMES_NS = {"ns": 1.0, "nsec": 1.0, "us": 1e3, "μs": 1e3, "usec": 1e3, "ms": 1e6, "msec": 1e6, "s": 1e9, "sec": 1e9}
_SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
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
    return bool(_TRACE_HEAD.search(text) or re.search(r'^"?Time ?\(%\)"?,"?Total Time', text, re.MULTILINE))


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
                fields = {to: cells[head] for head, to in _CSV_KERNEL.items() if head in cells and cells[head][0]}
                sizes = {to: round(_csv_number(cell, _SIZES)) for to, cell in fields.items()}
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
    number = float(cell[0].replace(",", "")) * units.get(cell[1], 1.0)
    if not abs(number) < _TOO_LARGE:
        raise ValueError(f"{cell[0]} is no such number")
    return number


def _csv_copy(name: str, cells: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    kinds = {cells[head][0].lower() for head in ("SrcMemKd", "DstMemKd") if head in cells}
    memory = next((kind for kind in (PINNED, PAGEABLE) if kind in kinds), "unified" if "Unified" in name else None)
    return {"bytes": round(_csv_number(cells["Bytes"], _SIZES)), "direction": read_direction(name), "memory": memory}
