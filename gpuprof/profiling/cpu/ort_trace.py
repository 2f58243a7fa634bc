"""Reads the profile that ONNX Runtime writes: a JSON array of events, of which each node's execution is one."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuprof.errors import InputError

_MAX_FILE_BYTES = 2 * 1024**3
# "…_fence_before" and "…_fence_after", which older versions write too, are not the node's own time.
_NODE = re.compile(r"(?P<name>.*)_kernel_time")


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One execution of one node."""

    #: ``name``, ``op_type``: Of the node in the graph that the runtime made of the model.
    name: str
    op_type: str
    repeat: int  #: Which run of the model it belongs to, from 0; those outside of any run come last.
    #: ``start_ns``, ``duration_ns``: To the microsecond: ONNX Runtime gives no more.
    start_ns: int
    duration_ns: int
    provider: str = ""


def read_trace(path: Path) -> tuple[NodeEvent, ...]:
    """Return the executions of nodes in the order in which they started; none of a model of constants alone.

    Raises `InputError` when the file is no profile of ONNX Runtime's, is cut off, or holds no execution of a node or
    model.
    """
    events = _load(path)
    runs = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == "model_run" and event.get("cat") == "Session"
    )
    events_in_order = sorted(_node_events(events, runs), key=lambda event: event.start_ns)
    if not events_in_order and not runs:
        raise InputError(f"{path} has no execution of a node", "is it a profile written by ONNX Runtime?")
    return tuple(events_in_order)


def _load(path: Path) -> list[dict[str, Any]]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {_MAX_FILE_BYTES >> 30} GiB", "profile fewer repeats")
        events = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not a whole JSON file", "was the profiled process killed?") from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError(f"{path} is not a list of events as ONNX Runtime writes it")
    return events


def _node_events(events: Sequence[dict[str, Any]], runs: Sequence[tuple[int, int]]) -> Iterator[NodeEvent]:
    for event in events:
        match = _NODE.fullmatch(str(event.get("name", "")))
        if event.get("cat") != "Node" or not match:
            continue
        arguments = event.get("args", {})
        start = int(event["ts"])
        yield NodeEvent(
            name=match["name"],
            op_type=str(arguments.get("op_name", "")),
            repeat=_repeat(start, runs),
            # ``ts`` and ``dur`` are microseconds (Trace Event Format).
            start_ns=start * 1000,
            duration_ns=int(event["dur"]) * 1000,
            provider=str(arguments.get("provider", "")),
        )


def _repeat(start: int, runs: Sequence[tuple[int, int]]) -> int:
    index = bisect_right(runs, start, key=lambda run: run[0]) - 1
    return index if index >= 0 and start <= runs[index][1] else len(runs)
