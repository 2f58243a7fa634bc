"""Reads timelines from JSON of the Trace Event Format: torch.profiler's (Kineto) and ONNX Runtime's own profile.

Kineto's estimate of occupancy is left out: see `gpuprof.profiling.timeline.creq`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.timeline import (
    NO_RANGE,
    OUTSIDE,
    PAGEABLE,
    PINNED,
    RUN_RANGE,
    Timeline,
    column,
    empty_frame,
    mark_runs,
    read_direction,
    tie_to_launches,
)

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OPERATORS, _ANNOTATIONS = ("cpu_op", "operator"), ("user_annotation",)
_KINETO_KINDS = {"kernel", "gpu_memcpy", "gpu_memset", *_LAUNCHES, *_OPERATORS, *_ANNOTATIONS}
_ORT_KINDS = {"Session", "Node"}
_MEMORIES = {"Pageable": PAGEABLE, "Pinned": PINNED}
# "…_fence_before" and "…_fence_after" of older versions are not part of the node's own time.
_NODE = re.compile(r"(?P<name>.*)_kernel_time")
_KINETO_FIX = "torch.profiler.profile(…).export_chrome_trace(FILE) writes one"
#: Argument of a kernel in Kineto and in ONNX Runtime's builds with CUDA profiling → column.
_KERNEL_ARGUMENTS = {
    "device": "device_index",
    "stream": "stream_id",
    "registers per thread": "registers_per_thread",
    # Kineto sums both kinds; occupancy does not tell them apart.
    "shared memory": "dynamic_shared_bytes",
    "graph node id": "graph_node",
    **{f"{part}_{axis}": f"{part}_{axis}" for part in ("grid", "block") for axis in "xyz"},
}
_GPU_PROPERTIES = {
    "numSms": "sms",
    "totalGlobalMem": "memory_bytes",
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
    "sharedMemPerBlockOptin": "shared_bytes_per_block",
}

_MOST = 2**62
Event = Mapping[str, Any]


def read_json_trace(path: Path, expect_kernels: bool = True) -> Timeline:
    """Return the timeline of a trace by torch.profiler or ONNX Runtime, plain or compressed with gzip.

    Raises `InputError` for another format, a truncated file, or missing kernels or nodes.
    """
    document = _load(path)
    events: Any = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError(f"{path} is not a trace of torch.profiler or ONNX Runtime", _KINETO_FIX)
    kinds: dict[str, list[Event]] = {}
    for event in events:
        if event.get("ph", "X") == "X" and _is_number(event.get("ts")) and _is_number(event.get("dur")):
            kinds.setdefault(str(event.get("cat", "")), []).append(event)
    if kinds.keys() & _ORT_KINDS:
        return _read_ort(kinds, path)
    lowered = {kind.lower(): part for kind, part in kinds.items()}
    if isinstance(document, list) and not lowered.keys() & _KINETO_KINDS:
        raise InputError(f"{path} is not a trace of torch.profiler or ONNX Runtime", _KINETO_FIX)
    return _read_kineto(lowered, document if isinstance(document, dict) else {}, path, expect_kernels)


def _load(path: Path) -> Any:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        # Times since the epoch have more digits than floats, and ids without a value are the largest unsigned number.
        return json.loads(content, parse_float=str, parse_int=lambda text: _clamp(int(text)))
    except (ValueError, EOFError, zlib.error, RecursionError, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole JSON file", "was the profiled process killed?") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _read_kineto(kinds: Mapping[str, list[Event]], document: Event, path: Path, expect_kernels: bool) -> Timeline:
    def of_kinds(names: Sequence[str]) -> list[Event]:
        return [event for name in names for event in kinds.get(name, [])]

    if expect_kernels and not kinds.get("kernel"):
        raise InputError(f"{path} has no kernel", "record with activities CPU and CUDA, on a GPU")
    calls = _tabulate(of_kinds(_LAUNCHES)).rename(columns={"start_ns": "launch_start_ns"})
    calls["launch_end_ns"] = calls["launch_start_ns"] + calls["duration_ns"]
    calls = calls[["correlation_id", "process_id", "thread_id", "launch_start_ns", "launch_end_ns"]]
    calls = calls[calls["correlation_id"] >= 0]
    annotations, operators = (_to_ranges(_tabulate(of_kinds(names))) for names in (_ANNOTATIONS, _OPERATORS))
    # PyTorch's operators are the ranges of kernels; user annotations only mark runs.
    ranges = pd.concat([annotations, operators], ignore_index=True)

    def tie(events: Sequence[Event]) -> pd.DataFrame:
        """Return device events with their launches; their own process and thread are the device and its stream."""
        frame = _tabulate(events).drop(columns=["process_id", "thread_id", "arguments"])
        return mark_runs(tie_to_launches(frame, calls, operators), annotations)

    copies = tie(kinds.get("gpu_memcpy", []))
    copies = copies.assign(
        direction=[read_direction(name) for name in copies["name"]],
        memory=pd.Series(
            [next((memory for word, memory in _MEMORIES.items() if word in name), None) for name in copies["name"]],
            dtype="object",
        ),
        bytes=pd.to_numeric(column(copies, "bytes")),
    )
    base = document.get("baseTimeNanoseconds", 0)
    return Timeline(
        kernels=tie(kinds.get("kernel", [])),
        copies=copies,
        memsets=tie(kinds.get("gpu_memset", [])),
        ranges=ranges,
        tool="torch.profiler",
        version=str(document.get("schemaVersion", "unknown")),
        gpus=_describe_gpus(document.get("deviceProperties")),
        epoch_ns=base if isinstance(base, int) else None,
    )


def _read_ort(kinds: Mapping[str, list[Event]], path: Path) -> Timeline:
    """Return runs as ranges, nodes on the host, and kernels if ONNX Runtime was built with CUDA profiling."""
    sessions = _tabulate(kinds.get("Session", []))
    runs = _to_ranges(sessions[sessions["name"] == "model_run"]).assign(name=RUN_RANGE)
    executed = [event for event in kinds.get("Node", []) if _NODE.fullmatch(str(event.get("name", "")))]
    frame = _tabulate(executed)
    frame = frame.assign(
        name=[str(_NODE.sub(r"\g<name>", name)) for name in frame["name"]],
        op_type=[str(arguments.get("op_name", "")) for arguments in frame["arguments"]],
        provider=[str(arguments.get("provider", "")) for arguments in frame["arguments"]],
    ).drop(columns="arguments")
    if not len(frame) and not len(runs):
        raise InputError(f"{path} has no execution of a node", "is it a profile written by ONNX Runtime?")
    launched = _tabulate(kinds.get("Kernel", []))
    launched = launched.assign(
        range=launched["arguments"].map(
            lambda entry: _NODE.sub(r"\g<name>", str(entry.get("parent_name", ""))) or None
        ),
        op_type=launched["arguments"].map(lambda entry: entry.get("op_name")),
        process_id=runs["process_id"].iloc[0] if len(runs) else NO_RANGE,  # events on a device have none
        launch_start_ns=NO_RANGE,
    )
    launched = mark_runs(launched.drop(columns="arguments"), runs)
    # Copies are among the kernels, without their bytes.
    is_copy = launched["name"].str.startswith("Memcpy")
    copies = launched[is_copy].assign(bytes=np.nan, memory=None)
    outer, notes = _leave_out_bodies(frame)
    nodes = mark_runs(outer.assign(launch_start_ns=outer["start_ns"]), runs)
    anywhere = mark_runs(outer, runs)["repeat"]  # for nodes on threads of the session's own
    return Timeline(
        kernels=launched[~is_copy].reset_index(drop=True),
        copies=copies.assign(direction=[read_direction(name) for name in copies["name"]]).reset_index(drop=True),
        nodes=nodes.assign(
            repeat=nodes["repeat"].where(nodes["repeat"] != OUTSIDE, anywhere), launch_start_ns=NO_RANGE
        ),
        ranges=runs,
        tool="onnxruntime",
        version="profile",
        notes=notes,
    )


def _leave_out_bodies(nodes: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return nodes without those in bodies of Loop, Scan and If, whose time belongs to the parent node, and a note."""
    if not len(nodes):
        return nodes, ()
    starts, ends = nodes["start_ns"].to_numpy(), (nodes["start_ns"] + nodes["duration_ns"]).to_numpy()
    outer = nodes[nodes["op_type"].isin(["Loop", "Scan", "If"])]
    spans = outer.assign(end_ns=outer["start_ns"] + outer["duration_ns"]).reset_index(drop=True)
    process, thread = nodes["process_id"].to_numpy(), nodes["thread_id"].to_numpy()
    positions = nodes.index.to_numpy()
    mask = np.ones(len(nodes), dtype=bool)
    for row, parent in zip(outer.index.tolist(), spans.to_dict("records"), strict=True):
        # Times are in whole microseconds, so that a body may seem to end after its parent.
        within = (starts >= parent["start_ns"]) & (starts < parent["end_ns"]) & (ends <= parent["end_ns"] + 1000)
        within &= process == parent["process_id"]
        mask &= ~(within & (thread == parent["thread_id"]) & (positions != row))
    sums = nodes[~mask].groupby("op_type", sort=False)["duration_ns"].sum()
    times = ", ".join(f"{kind} {time_ns / 1e3:,.0f} us" for kind, time_ns in sums.sort_values(ascending=False).items())
    notes = (f"within bodies of loops and branches, part of these nodes' times: {times}",) if times else ()
    return nodes[mask].reset_index(drop=True), notes


def _tabulate(events: Sequence[Event]) -> pd.DataFrame:
    """Return events in order of start: their times, ids, correlation, bytes, and the arguments of a launch."""
    if not events:
        names = ("name", "start_ns", "duration_ns", "process_id", "thread_id", "correlation_id")
        return empty_frame(*names).assign(arguments=pd.Series(dtype="object"))
    arguments = [event["args"] if isinstance(event.get("args"), dict) else {} for event in events]
    columns: dict[str, Any] = {
        "name": [str(event.get("name", "")) for event in events],
        "start_ns": np.array([_to_ns(event["ts"]) for event in events], dtype=np.int64),
        "duration_ns": np.array([_to_ns(event["dur"]) for event in events], dtype=np.int64),
        # Non-numeric process or thread ids are not of the host.
        "process_id": np.array([_to_id(event.get("pid")) for event in events], dtype=np.int64),
        "thread_id": np.array([_to_id(event.get("tid")) for event in events], dtype=np.int64),
        "correlation_id": np.array([_to_id(entry.get("correlation")) for entry in arguments], dtype=np.int64),
        "arguments": arguments,
    }
    if any("bytes" in entry for entry in arguments):
        columns["bytes"] = [_to_number(entry.get("bytes")) for entry in arguments]
    for argument, name in _KERNEL_ARGUMENTS.items():
        if any(argument in entry for entry in arguments):
            columns[name] = [_to_number(entry.get(argument)) for entry in arguments]
    for part in ("grid", "block"):
        sizes = [entry.get(part) for entry in arguments]
        if any(isinstance(size, list) and len(size) == 3 for size in sizes):
            for place, axis in enumerate("xyz"):
                columns[f"{part}_{axis}"] = [
                    _to_number(s[place]) if isinstance(s, list) and len(s) == 3 else None for s in sizes
                ]
    return pd.DataFrame(columns).sort_values("start_ns", kind="stable").reset_index(drop=True)


def _to_ranges(table: pd.DataFrame) -> pd.DataFrame:
    ended = table.assign(end_ns=table["start_ns"] + table["duration_ns"])
    return ended[["name", "start_ns", "end_ns", "process_id", "thread_id"]].reset_index(drop=True)


def _describe_gpus(properties: Any) -> dict[int, GpuDescription]:
    """Return the trace's description of each GPU: a list of objects, of which older versions write less."""
    gpus = {}
    for gpu in properties if isinstance(properties, list) else ():
        if isinstance(gpu, dict) and isinstance(gpu.get("id"), int) and "name" in gpu:
            figures = {name: gpu[key] for key, name in _GPU_PROPERTIES.items() if isinstance(gpu.get(key), int)}
            threads = gpu.get("maxThreadsPerMultiprocessor")
            version = (gpu.get("computeMajor"), gpu.get("computeMinor"))
            gpus[gpu["id"]] = GpuDescription(
                str(gpu["name"]),
                compute_capability=None if None in version else f"{version[0]}.{version[1]}",
                warps_per_sm=threads // 32 if isinstance(threads, int) else None,
                **figures,
            )
    return gpus


def _to_ns(microseconds: Any) -> int:
    """Times are microseconds with a fraction, since the epoch: their product with 1000 is not exact as a float."""
    text = str(microseconds)
    if "e" in text or "E" in text:
        return _clamp(round(float(microseconds) * 1000))
    whole, _, fraction = text.partition(".")
    return _clamp(int(whole) * 1000 + int((fraction + "000")[:3]))


def _clamp(number: int) -> int:
    """Return a number clamped to 64 bits; larger ones have no meaning."""
    return min(max(number, -_MOST), _MOST)


def _is_number(value: Any) -> bool:
    try:
        return value is not None and not isinstance(value, bool) and np.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _to_id(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _to_number(value: Any) -> int | None:
    """Return a size or an id, which ONNX Runtime writes as text; None for other values."""
    try:
        return None if value is None else _clamp(int(value))
    except (TypeError, ValueError):
        return None
