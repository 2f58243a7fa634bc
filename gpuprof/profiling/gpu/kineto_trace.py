"""Reads the trace that ``torch.profiler`` writes: kernels as CUPTI saw them, each with the operator that launched it.

Its own estimate of occupancy is left out: see `gpuprof.profiling.timeline.launch_occupancy`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.timeline.attribution import find_enclosing_runs, find_innermost_ranges
from gpuprof.profiling.timeline.timeline import D2H, H2D, PAGEABLE, PINNED, Timeline, empty_copies, empty_ranges
from gpuprof.runtime.providers import NODE_RANGE

_MAX_BYTES = 2 * 2**30
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OPERATORS = ("cpu_op", "operator")
_ANNOTATIONS = ("user_annotation",)
_DIRECTIONS = {"HtoD": H2D, "DtoH": D2H, "DtoD": "d2d"}
_MEMORIES = {"Pageable": PAGEABLE, "Pinned": PINNED}
_FIX = "torch.profiler.profile(…).export_chrome_trace(FILE) writes one"

Event = Mapping[str, Any]


def read_kineto(path: Path, expect_kernels: bool = True) -> Timeline:
    """Return the timeline of a trace by ``torch.profiler``, plain or compressed with gzip.

    The ranges of kernels are the nodes of an ONNX model where `gpuprof.runtime.torch_session` ran it, else PyTorch's
    operators. Raises `InputError` when it is no such trace, is cut off, or has no kernels where there should be some.
    """
    document = _load_events(path)
    events: list[Event] = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    kinds = _group_by_kind(events)
    kernels_found = kinds.get("kernel", [])
    if expect_kernels and not kernels_found:
        raise InputError(f"{path} has no kernel", "record with activities CPU and CUDA, on a GPU")
    launches = [event for kind in _LAUNCHES for event in kinds.get(kind, [])]
    annotations = _read_ranges([event for kind in _ANNOTATIONS for event in kinds.get(kind, [])])
    is_node = [str(name).startswith(NODE_RANGE) for name in annotations["name"]]
    nodes = annotations[np.array(is_node, dtype=bool)].reset_index(drop=True)
    # An op of PyTorch within a node is not what the model calls it.
    operators = nodes if len(nodes) else _read_ranges([event for kind in _OPERATORS for event in kinds.get(kind, [])])
    launched = _read_launch_calls(launches)
    kernels = _read_kernels(kernels_found)
    return Timeline(
        kernels=_tie_to_launches(kernels, launched, operators, annotations) if len(kernels) else kernels,
        copies=_read_copies(kinds.get("gpu_memcpy", []), launched, operators, annotations),
        ranges=annotations if len(nodes) else pd.concat([annotations, operators], ignore_index=True),
        tool="torch.profiler",
        version=str(document.get("schemaVersion", "unknown")),
        gpus=_describe_gpus(document.get("deviceProperties")),
    )


def _load_events(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES >> 30} GiB", "record fewer repeats")
        content = path.read_bytes()
        document = json.loads(_decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole JSON file", _FIX) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InputError(f"{path} is not a trace of torch.profiler", _FIX)
    if not all(isinstance(event, dict) for event in document["traceEvents"]):
        raise InputError(f"{path} is not a trace of torch.profiler", _FIX)
    return document


def _decompress(content: bytes) -> bytes:
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    # Bounded: a small file can unpack to any size.
    unpacked = inflate.decompress(content, _MAX_BYTES)
    if inflate.unconsumed_tail:
        raise InputError(f"a trace of more than {_MAX_BYTES >> 30} GiB", "record fewer repeats")
    if not inflate.eof:
        raise EOFError("the compressed file is cut off")
    return unpacked


def _describe_gpus(properties: Any) -> dict[int, GpuDescription]:
    """Return what the trace says of each GPU: a list of objects, of which older versions write less."""
    gpus = {}
    for gpu in properties if isinstance(properties, list) else ():
        if isinstance(gpu, dict) and isinstance(gpu.get("id"), int) and "name" in gpu:
            known = {name: gpu[said] for said, name in _DEVICE_PROPERTIES.items() if isinstance(gpu.get(said), int)}
            threads = gpu.get("maxThreadsPerMultiprocessor")
            version = (gpu.get("computeMajor"), gpu.get("computeMinor"))
            gpus[gpu["id"]] = GpuDescription(
                str(gpu["name"]),
                compute_capability=None if None in version else f"{version[0]}.{version[1]}",
                warps_per_sm=threads // 32 if isinstance(threads, int) else None,
                **known,
            )
    return gpus


_DEVICE_PROPERTIES = {
    "numSms": "sms",
    "totalGlobalMem": "memory_bytes",
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
    "sharedMemPerBlockOptin": "shared_bytes_per_block",
}


def _group_by_kind(events: Sequence[Event]) -> dict[str, list[Event]]:
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(str(event.get("cat", "")).lower(), []).append(event)
    return kinds


def _to_ns(microseconds: Any) -> int:
    """Times are microseconds with a fraction, since the epoch: their product with 1000 is not exact as a float."""
    whole, _, fraction = str(microseconds).partition(".")
    return int(whole) * 1000 + int((fraction + "000")[:3]) if "e" not in fraction else round(float(microseconds) * 1000)


def _read_ranges(events: Sequence[Event]) -> pd.DataFrame:
    if not events:
        return empty_ranges()
    starts = np.array([_to_ns(event["ts"]) for event in events], dtype=np.int64)
    lengths = np.array([_to_ns(event["dur"]) for event in events], dtype=np.int64)
    return pd.DataFrame(
        {
            "name": [str(event.get("name", "")) for event in events],
            "start_ns": starts,
            "end_ns": starts + lengths,
            "process_id": _read_ids(events, "pid"),
            "thread_id": _read_ids(events, "tid"),
        }
    )


def _read_launch_calls(events: Sequence[Event]) -> pd.DataFrame:
    """Return where and when each launch was called, under its correlation id."""
    known = [event for event in events if isinstance(_read_arguments(event).get("correlation"), int)]
    frame = pd.DataFrame(
        {
            "correlation_id": np.array([_read_arguments(event)["correlation"] for event in known], dtype=np.int64),
            "process_id": _read_ids(known, "pid"),
            "thread_id": _read_ids(known, "tid"),
            "launch_start_ns": np.array([_to_ns(event["ts"]) for event in known], dtype=np.int64),
        }
    )
    # A call of the runtime and the driver's call inside it can share an id: the outer one began first.
    return frame.sort_values("launch_start_ns", kind="stable").drop_duplicates("correlation_id")


def _read_kernels(events: Sequence[Event]) -> pd.DataFrame:
    rows = []
    for event in events:
        arguments = _read_arguments(event)
        row: dict[str, Any] = {
            "name": str(event.get("name", "")),
            "start_ns": _to_ns(event["ts"]),
            "duration_ns": _to_ns(event["dur"]),
            "correlation_id": _read_correlation(event),
        }
        for given, column in _KERNEL_ARGUMENTS.items():
            if given in arguments:
                row[column] = arguments[given]
        for part in ("grid", "block"):
            if len(arguments.get(part, ())) == 3:
                row |= {f"{part}_{axis}": size for axis, size in zip("xyz", arguments[part], strict=True)}
        rows.append(row)
    if not rows:
        return pd.DataFrame({"name": [], "start_ns": [], "duration_ns": [], "repeat": []})
    return pd.DataFrame(rows).sort_values("start_ns", kind="stable").reset_index(drop=True)


_KERNEL_ARGUMENTS = {
    "device": "device_index",
    "stream": "stream_id",
    "registers per thread": "registers_per_thread",
    # Kineto sums both kinds; occupancy does not tell them apart.
    "shared memory": "dynamic_shared_bytes",
    "graph node id": "graph_node",
}


def _read_copies(
    events: Sequence[Event], launched: pd.DataFrame, operators: pd.DataFrame, annotations: pd.DataFrame
) -> pd.DataFrame:
    if not events:
        return empty_copies()
    frame = pd.DataFrame(
        {
            "start_ns": [_to_ns(event["ts"]) for event in events],
            "duration_ns": [_to_ns(event["dur"]) for event in events],
            "bytes": [int(_read_arguments(event).get("bytes", 0)) for event in events],
            "direction": [_meaning_of_name(_DIRECTIONS, event) or "other" for event in events],
            "memory": [_meaning_of_name(_MEMORIES, event) for event in events],
            "correlation_id": [_read_correlation(event) for event in events],
            "device_index": [_read_arguments(event).get("device") for event in events],
        }
    ).sort_values("start_ns", kind="stable")
    tied = _tie_to_launches(frame.reset_index(drop=True), launched, operators, annotations)
    return tied[["start_ns", "duration_ns", "bytes", "direction", "memory", "repeat", "device_index"]]


def _meaning_of_name(meanings: Mapping[str, str], event: Event) -> str | None:
    """Return what the event's name says, as in ``"Memcpy HtoD (Pageable -> Device)"``."""
    return next((meaning for word, meaning in meanings.items() if word in str(event.get("name", ""))), None)


def _tie_to_launches(
    frame: pd.DataFrame, launched: pd.DataFrame, operators: pd.DataFrame, annotations: pd.DataFrame
) -> pd.DataFrame:
    frame = frame.merge(launched, on="correlation_id", how="left")
    for name in ("process_id", "thread_id", "launch_start_ns"):
        frame[name] = frame[name].fillna(-1).astype(np.int64)
    where = tuple(frame[name].to_numpy(dtype=np.int64) for name in ("process_id", "thread_id", "launch_start_ns"))
    names = np.array([*operators["name"].tolist(), None], dtype=object)
    return frame.assign(
        range=pd.Series(names[find_innermost_ranges(operators, *where)], dtype="object"),
        repeat=find_enclosing_runs(annotations, *where),
    )


def _read_correlation(event: Event) -> int:
    """Return the number that an event shares with the call that caused it; -1 where it has none."""
    correlation = _read_arguments(event).get("correlation")
    return correlation if isinstance(correlation, int) else -1


def _read_ids(events: Sequence[Event], key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return process or thread ids; what is no number there is no thread of the host."""
    return np.array([event[key] if isinstance(event.get(key), int) else -1 for event in events], dtype=np.int64)


def _read_arguments(event: Event) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}
