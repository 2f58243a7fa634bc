"""Reads a timeline from the SQLite file that ``nsys export`` writes.

A kernel is tied to the call that launched it by process and correlation id, the call to a range by thread and time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.nsight.nsys_tables import NsysTables
from gpuprof.profiling.timeline.attribution import NO_RANGE, Integers, find_enclosing_runs, find_innermost_ranges
from gpuprof.profiling.timeline.timeline import (
    D2H,
    H2D,
    OUTSIDE,
    PAGEABLE,
    PINNED,
    RUN_RANGE,
    Timeline,
    column,
    empty_copies,
    empty_ranges,
)

_KERNELS, _CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_COPIES, _RANGES, _GRAPHS = "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_KERNEL_COLUMNS = {
    "start": "start_ns",
    "end": "end_ns",
    "demangledName": "name_id",
    "shortName": "short_name_id",
    "globalPid": "global_pid",
    "deviceId": "device_index",
    "streamId": "stream_id",
    "correlationId": "correlation_id",
    "gridX": "grid_x",
    "gridY": "grid_y",
    "gridZ": "grid_z",
    "blockX": "block_x",
    "blockY": "block_y",
    "blockZ": "block_z",
    "registersPerThread": "registers_per_thread",
    "staticSharedMemory": "static_shared_bytes",
    "dynamicSharedMemory": "dynamic_shared_bytes",
    "graphNodeId": "graph_node",
}
_CALL_COLUMNS = {"start": "launch_start_ns", "globalTid": "global_tid", "correlationId": "correlation_id"}
_COPY_COLUMNS = {
    "start": "start_ns",
    "end": "end_ns",
    "deviceId": "device_index",
    "bytes": "bytes",
    "copyKind": "kind",
    "srcKind": "from_memory",
    "dstKind": "to_memory",
    "globalPid": "global_pid",
    "correlationId": "correlation_id",
}
_RANGE_COLUMNS = {
    "start": "start_ns",
    "end": "end_ns",
    "eventType": "kind",
    "text": "text",
    "textId": "text_id",
    "globalTid": "global_tid",
}
#: NVTX_EVENTS.eventType (nsys's ENUM_NSYS_EVENT_TYPE): ranges of one thread, and those that another may end.
_PUSH_POP, _START_END = 59, 60
_DIRECTIONS = {1: H2D, 2: D2H, 8: "d2d", 10: "p2p"}  # CUpti_ActivityMemcpyKind
_MEMORIES = {0: PAGEABLE, 1: PINNED}  # nsys's own ENUM_CUDA_MEM_KIND, which counts otherwise than CUPTI's
# A global id is made of hardware, machine, process and thread: 8, 8, 24 and 24 bits.
_THREAD_BITS, _ID_MASK = 24, (1 << 24) - 1
_TO_THE_END = np.iinfo(np.int64).max
_GRAPH_FIX = "record again with --cuda-graph-trace=node"


def read_nsys(path: Path, expect_kernels: bool = True) -> Timeline:
    """Return the timeline of a report that ``nsys export --type=sqlite`` wrote.

    ``expect_kernels``: False for a program that uses no GPU: a report without kernels is then an empty timeline. Raises
    `InputError` when it is no such report, is cut off, or has no kernels where there should be some, saying why.
    """
    with NsysTables(path) as tables:
        if expect_kernels and not tables.has(_KERNELS):
            raise _no_kernels_error(tables)
        strings = _read_strings(tables)
        ranges = _read_ranges(tables, strings)
        calls = _read_calls(tables)
        kernels, notes = _read_kernels(tables, strings, calls, ranges)
        return Timeline(
            kernels=kernels,
            copies=_read_copies(tables, calls, ranges),
            ranges=ranges,
            tool="nsys",
            version=tables.version,
            gpus=_read_gpus(tables),
            notes=notes,
        )


def _no_kernels_error(tables: NsysTables) -> InputError:
    if tables.has(_GRAPHS):
        return InputError(f"{tables.path} has CUDA graphs as wholes and no kernels of them", _GRAPH_FIX)
    if tables.has(_CALLS[0]):
        return InputError(
            f"{tables.path} has CUDA calls but no kernel", f"if the program launched CUDA graphs, {_GRAPH_FIX}"
        )
    return InputError(f"{tables.path} has no kernel and no CUDA call", "record with -t cuda,nvtx, on a GPU")


def _read_strings(tables: NsysTables) -> dict[int, str]:
    if not tables.has("StringIds"):
        return {}
    frame = tables.read_table("StringIds", {"id": "id", "value": "value"}, ("id", "value"))
    return dict(zip(frame["id"].tolist(), frame["value"].tolist(), strict=True))


def _read_ranges(tables: NsysTables, strings: dict[int, str]) -> pd.DataFrame:
    if not tables.has(_RANGES):
        return empty_ranges()
    frame = tables.read_table(_RANGES, _RANGE_COLUMNS, ("start", "end", "eventType", "globalTid"), ("globalTid",))
    frame = frame[frame["kind"].isin([_PUSH_POP, _START_END])].reset_index(drop=True)
    texts = frame["text"].tolist() if "text" in frame else [None] * len(frame)
    ids = frame["text_id"].tolist() if "text_id" in frame else [None] * len(frame)
    process, thread = _split_global_ids(frame["global_tid"])
    names = [
        text if isinstance(text, str) else strings.get(_to_integer(id_), "")
        for text, id_ in zip(texts, ids, strict=True)
    ]
    return pd.DataFrame(
        {
            "name": names,
            "start_ns": frame["start_ns"].to_numpy(dtype=np.int64),
            "end_ns": _fill_open_ends(frame["end_ns"]),
            "process_id": process,
            "thread_id": thread,
        }
    )


def _read_calls(tables: NsysTables) -> pd.DataFrame:
    """Return each call's start and thread under the process and correlation id that its kernels carry."""
    names = tuple(_CALL_COLUMNS)
    parts = [tables.read_table(table, _CALL_COLUMNS, names, names) for table in _CALLS if tables.has(table)]
    frame = pd.concat(parts) if parts else pd.DataFrame(columns=list(_CALL_COLUMNS.values()), dtype=np.int64)
    process, thread = _split_global_ids(frame["global_tid"])
    table = pd.DataFrame(
        {
            "process_id": process,
            "correlation_id": frame["correlation_id"].to_numpy(dtype=np.int64),
            "thread_id": thread,
            "launch_start_ns": frame["launch_start_ns"].to_numpy(dtype=np.int64),
        }
    )
    # A runtime call and the driver call inside of it can share an id: the outer one began first.
    return table.sort_values("launch_start_ns", kind="stable").drop_duplicates(["process_id", "correlation_id"])


def _read_kernels(
    tables: NsysTables, strings: dict[int, str], calls: pd.DataFrame, ranges: pd.DataFrame
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    if not tables.has(_KERNELS):
        empty = pd.DataFrame({"name": [], "start_ns": [], "duration_ns": [], "repeat": []})
        return empty, ("no kernels: nothing ran on a GPU",)
    frame = tables.read_table(_KERNELS, _KERNEL_COLUMNS, ("start", "end"))
    if "name_id" not in frame and "short_name_id" not in frame:
        raise InputError(f"{tables.path}: kernels have no names", "a version of nsys that gpuprof does not know")
    # pandas' own map over a dictionary of strings is vectorised over the distinct ids.
    named = frame["name_id"] if "name_id" in frame else frame["short_name_id"]
    frame["name"] = named.map(strings).fillna("unknown")
    frame["duration_ns"] = frame["end_ns"] - frame["start_ns"]
    frame["process_id"] = _split_global_ids(frame["global_pid"])[0] if "global_pid" in frame else np.int64(0)
    frame = frame.sort_values("start_ns", kind="stable").reset_index(drop=True)
    frame = _tie_to_launches(frame, calls, ranges)
    untied = int((frame["thread_id"] == NO_RANGE).sum())
    notes = (f"{untied} of {len(frame)} kernels have no launch call in the report",) if untied else ()
    gone = [name for name in ("name_id", "short_name_id", "global_pid", "end_ns") if name in frame]
    return frame.drop(columns=gone), notes


def _read_copies(tables: NsysTables, calls: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    if not tables.has(_COPIES):
        return empty_copies()
    frame = tables.read_table(_COPIES, _COPY_COLUMNS, ("start", "end", "bytes", "copyKind"))
    frame["duration_ns"] = frame["end_ns"] - frame["start_ns"]
    frame["direction"] = frame["kind"].map(_DIRECTIONS).fillna("other")
    frame["process_id"] = _split_global_ids(frame["global_pid"])[0] if "global_pid" in frame else np.int64(0)
    frame["memory"] = _find_host_memory(frame)
    frame = _tie_to_launches(frame.sort_values("start_ns", kind="stable").reset_index(drop=True), calls, ranges)
    kept = ["start_ns", "duration_ns", "bytes", "direction", "memory", "repeat", "device_index"]
    return frame[[name for name in kept if name in frame]]


def _find_host_memory(copies: pd.DataFrame) -> pd.Series[Any]:
    """Return the kind of memory at the host's end of each copy, None where there is none or it is not said."""
    source, target = (column(copies, name).map(_MEMORIES) for name in ("from_memory", "to_memory"))
    return source.where(copies["direction"] == H2D, target.where(copies["direction"] == D2H, None))


def _tie_to_launches(frame: pd.DataFrame, calls: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Add the launch, the innermost range around it, and which run of the model that is part of."""
    if "correlation_id" not in frame:
        return frame.assign(thread_id=NO_RANGE, launch_start_ns=0, range=None, repeat=OUTSIDE)
    frame["correlation_id"] = frame["correlation_id"].fillna(NO_RANGE).astype(np.int64)
    frame = frame.merge(calls, on=["process_id", "correlation_id"], how="left")
    process = frame["process_id"].to_numpy(dtype=np.int64)
    thread = frame["thread_id"].fillna(NO_RANGE).to_numpy(dtype=np.int64)
    moment = frame["launch_start_ns"].fillna(NO_RANGE).to_numpy(dtype=np.int64)
    runs = (ranges["name"] == RUN_RANGE).to_numpy(dtype=bool)
    return frame.assign(
        thread_id=thread,
        launch_start_ns=moment,
        range=_find_range_names(ranges[~runs].reset_index(drop=True), process, thread, moment),
        repeat=find_enclosing_runs(ranges, process, thread, moment),
    )


def _find_range_names(ranges: pd.DataFrame, process: Integers, thread: Integers, moment: Integers) -> pd.Series[Any]:
    inner = find_innermost_ranges(ranges, process, thread, moment)
    names = np.array([*ranges["name"].tolist(), None], dtype=object)
    return pd.Series(names[inner], dtype="object")


def _read_gpus(tables: NsysTables) -> dict[int, GpuDescription]:
    """Return what the report says of each GPU, by the index that kernels carry."""
    if not {"id", "name"} <= set(tables.columns("TARGET_INFO_GPU")):
        return {}
    names = {"id": "id", "cuDevice": "cuda", "name": "name", "computeMajor": "major", "computeMinor": "minor"}
    rows = tables.read_table("TARGET_INFO_GPU", {**names, **_GPU_COLUMNS}).to_dict("records")
    indices = _read_cuda_indices(tables)
    gpus = {}
    for row in rows:
        index = row["cuda"] if row.get("cuda") is not None else indices.get(int(row["id"]), row["id"])
        version = (row.get("major"), row.get("minor"))
        known = {name: row[name] for name in _GPU_COLUMNS.values() if row.get(name)}
        clock = known.pop("clock_hz", None)
        gpus[int(index)] = GpuDescription(
            str(row["name"]),
            compute_capability=None if None in version else f"{int(version[0])}.{int(version[1])}",  # type: ignore[arg-type]
            clock_mhz=clock / 1e6 if clock else None,
            **known,
        )
    return gpus


#: Columns of ``TARGET_INFO_GPU`` in newer exports: the clock is in Hz, the bandwidth in bytes per second.
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


def _read_cuda_indices(tables: NsysTables) -> dict[int, int]:
    """Return GPU's id → its index among CUDA's devices, which newer exports keep in a table of its own."""
    if not {"gpuId", "cudaId"} <= set(tables.columns("TARGET_INFO_CUDA_DEVICE")):
        return {}
    frame = tables.read_table("TARGET_INFO_CUDA_DEVICE", {"gpuId": "gpu", "cudaId": "cuda"})
    return {int(gpu): int(cuda) for gpu, cuda in zip(frame["gpu"].tolist(), frame["cuda"].tolist(), strict=True)}


def _split_global_ids(global_ids: pd.Series[Any]) -> tuple[Integers, Integers]:
    ids = global_ids.fillna(0).to_numpy(dtype=np.int64)
    return ids >> _THREAD_BITS & _ID_MASK, ids & _ID_MASK


def _fill_open_ends(ends: pd.Series[Any]) -> Integers:
    """Return ends, that of a range which was never left lying behind everything; floats would lose nanoseconds."""
    return np.array([_TO_THE_END if pd.isna(end) else int(end) for end in ends.tolist()], dtype=np.int64)


def _to_integer(number: object) -> int:
    return -1 if pd.isna(number) else int(number)  # type: ignore[call-overload]
