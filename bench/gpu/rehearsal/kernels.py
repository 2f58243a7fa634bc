"""Makes kernels of the runs in traces of PyTorch's profiler on the CPU, and counters of them as ncu would print."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Where the played ncu wants the counters of the last run.
COUNTED = "REHEARSAL_COUNTED"
#: Kernels of one run, in order of launch: their names, and blocks in the grid.
KERNELS = {"conv": 400, "addmm": 132, "relu": 80, "softmax": 12}
_BLOCK, _COPIED = 256, 4 * 2**20
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "%",
}
_HEAD = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
#: A word among the attributes, as ncu 2025.3 has it.
_WORD = "device__attribute_confidential_computing_mode"

Event = Mapping[str, Any]


def add_kernels(path: str) -> None:
    """Add to each run in a trace its launches and kernels, one after another, and a copy in and one out."""
    file = Path(path)
    document = json.loads(file.read_text(encoding="utf-8"))
    added: list[dict[str, Any]] = []
    for run in [event for event in document["traceEvents"] if event.get("name") == "gpuprof-run"]:
        step = run["dur"] / (len(KERNELS) + 2)
        for number, name in enumerate(KERNELS, start=1):
            launched = {**run, "ts": run["ts"] + number * step}
            added += _launch_events(launched, "kernel", kernel_name(name), 0.8 * step, len(added), **_launch(name))
        for name, at in (("Memcpy HtoD (Pageable -> Device)", 0.0), ("Memcpy DtoH (Device -> Pageable)", 0.9)):
            copied = {**run, "ts": run["ts"] + at * run["dur"]}
            added += _launch_events(copied, "gpu_memcpy", name, 0.05 * run["dur"], len(added), bytes=_COPIED)
    document["traceEvents"] += added
    file.write_text(json.dumps(document), encoding="utf-8")


def kernel_name(name: str) -> str:
    """Return a name as long-winded as a kernel's."""
    return f"void rehearsed::{name}_kernel<float, 4>(float*)"


def count_last_run(run: Callable[[], Any], path: str) -> Callable[[], Any]:
    """Return ``run``, which now leaves the counters of a run as the CSV of ncu in ``path``."""

    def run_counted() -> Any:
        write_counters(Path(path))
        return run()

    return run_counted


def write_counters(path: Path) -> None:
    """Write the counters of one run's kernels as ncu's raw page."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("==PROF== Connected to process 1 (rehearsed)\n")
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow([*_HEAD, _WORD, *_METRICS])
        writer.writerow([""] * (len(_HEAD) + 1) + list(_METRICS.values()))
        for number, name in enumerate(KERNELS):
            shapes = [f"({', '.join(map(str, _launch(name)[part]))})" for part in ("block", "grid")]
            label = kernel_name(name).replace("4>(float*)", "(int)4>(T1 *)")  # as ncu writes CUPTI's name
            values = ["1,234.00", "37.5", "12.5", "20.0"]
            writer.writerow([number, 1, "python", "127.0.0.1", label, 1, 7, *shapes, "No-CC", *values])


def _launch(name: str) -> dict[str, Any]:
    large = "mm" in name  # of products torch.profiler says that they occupy nothing: it is not believed
    return {
        "registers per thread": 32,
        "shared memory": 98304 if large else 1024,
        "grid": [KERNELS[name], 1, 1],
        "block": [_BLOCK, 1, 1],
        "est. achieved occupancy %": 0 if large else 37,
    }


def _launch_events(
    event: Event, kind: str, name: str, duration_us: float, turn: int, **arguments: Any
) -> list[dict[str, Any]]:
    where = {"ph": "X", "pid": event["pid"], "tid": event["tid"]}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": event["ts"], "dur": 1, **where}
    executed = {"cat": kind, "name": name, "ph": "X", "pid": 0, "tid": 7, "ts": event["ts"], "dur": duration_us}
    of = {"correlation": 1_000_000 + turn, "device": 0, "stream": 7}
    return [{**call, "args": of}, {**executed, "args": {**of, **arguments}}]
