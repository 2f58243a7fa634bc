"""Makes kernels of the operators that PyTorch's profiler saw on the CPU, in its traces and as ncu would count them."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Where the played ncu wants the counters of the last run.
COUNTED = "REHEARSAL_COUNTED"
_BLOCK, _COPIED = 256, 4 * 2**20
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "%",
}
_HEAD = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")

Event = Mapping[str, Any]


def add_kernels(path: str) -> None:
    """Add to a trace a launch and a kernel for each operator that calls none, and a copy in and out for each run."""
    file = Path(path)
    document = json.loads(file.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    added: list[dict[str, Any]] = []
    for event in leaves(events):
        added += _launch_events(event, "kernel", kernel_name(event), event["dur"], len(added), **_launch(event))
    for run in [event for event in events if event.get("name") == "gpuprof-run"]:
        for name in ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"):
            added += _launch_events(run, "gpu_memcpy", name, 400.0, len(added), bytes=_COPIED)
    document["traceEvents"] = [*events, *added]
    file.write_text(json.dumps(document), encoding="utf-8")


def leaves(events: Sequence[Event]) -> list[Event]:
    """Return PyTorch's operators within which no other began, in order of start."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and event.get("ph") == "X"]
    operators.sort(key=lambda event: (event["ts"], -event["dur"]))
    inner = zip(operators, [*operators[1:], None], strict=True)
    return [one for one, after in inner if after is None or after["ts"] >= one["ts"] + one["dur"]]


def kernel_name(event: Event) -> str:
    """Return a name as long-winded as a kernel's."""
    return f"void rehearsed::{str(event['name']).removeprefix('aten::')}_kernel<float, 4>(float*)"


def count_last_run(run: Callable[[], Any], path: str) -> Callable[[], Any]:
    """Return ``run``, which now leaves the counters of the last time that it ran as the CSV of ncu in ``path``."""
    from torch import profiler

    def run_observed() -> Any:
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recording:
            outputs = run()
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace.json"
            recording.export_chrome_trace(str(trace))
            _write_csv(Path(path), leaves(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]))
        return outputs

    return run_observed


def _write_csv(path: Path, events: Sequence[Event]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("==PROF== Connected to process 1 (rehearsed)\n")
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow([*_HEAD, *_METRICS])
        writer.writerow([""] * len(_HEAD) + list(_METRICS.values()))
        for number, event in enumerate(events):
            launch = _launch(event)
            shapes = [f"({', '.join(map(str, launch[part]))})" for part in ("block", "grid")]
            values = [f"{1000.0 * event['dur']:,.2f}", "37.5", "12.5", "20.0"]
            name = kernel_name(event).replace("4>(float*)", "(int)4>(T1 *)")  # as ncu writes what CUPTI gives
            writer.writerow([number, 1, "python", "127.0.0.1", name, 1, 7, *shapes, *values])


def _launch(event: Event) -> dict[str, Any]:
    blocks = 1 + len(str(event["name"])) * 8
    large = "mm" in str(event["name"])  # of products torch.profiler says that they occupy nothing: it is not believed
    return {
        "registers per thread": 32,
        "shared memory": 98304 if large else 1024,
        "grid": [blocks, 1, 1],
        "block": [_BLOCK, 1, 1],
        "est. achieved occupancy %": 0 if large else 37,
    }


def _launch_events(
    event: Event, kind: str, name: str, duration_us: float, turn: int, **arguments: Any
) -> list[dict[str, Any]]:
    where = {"ph": "X", "pid": event["pid"], "tid": event["tid"]}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": event["ts"], "dur": 1, **where}
    done = {"cat": kind, "name": name, "ph": "X", "pid": 0, "tid": 7, "ts": event["ts"], "dur": duration_us}
    of = {"correlation": 1_000_000 + turn, "device": 0, "stream": 7}
    return [{**call, "args": of}, {**done, "args": {**of, **arguments}}]
