"""Writes traces as ``torch.profiler`` does."""

import json
from pathlib import Path
from typing import Any

EPOCH_US = 1_700_000_000_000_000


def trace(runs: int = 2) -> dict[str, Any]:
    """Runs of two kernels each, the first launched by ``aten::conv2d``, with a copy in and a copy out."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "x"}}]
    events += _launch("warm", 5, 10, 900)
    for run in range(runs):
        origin = 1000 * (run + 1)
        events.append(_event("user_annotation", "gpuprof-run", origin, 900))
        events.append(_event("cpu_op", "aten::conv2d", origin + 10, 100))
        events += _launch("conv_kernel", origin + 20, origin + 200, 10 * run + 1)
        events += _launch("relu_kernel", origin + 150, origin + 300, 10 * run + 2)
        for turn, (name, size) in enumerate((("Memcpy HtoD (Pageable -> Device)", 4096), ("Memcpy DtoH", 64))):
            correlation = 10 * run + 3 + turn
            events.append(_event("cuda_runtime", "cudaMemcpyAsync", origin + 160, 2, correlation=correlation))
            copy = {"device": 0, "stream": 7, "correlation": correlation, "bytes": size}
            events.append(_event("gpu_memcpy", name, origin + 170, 5, pid=0, tid=7, **copy))
    gpu = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    return {"schemaVersion": 1, "deviceProperties": [gpu], "traceEvents": events}


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def _launch(name: str, called: int, started: int, correlation: int) -> list[dict[str, Any]]:
    shape = {
        "device": 0,
        "stream": 7,
        "correlation": correlation,
        "registers per thread": 64,
        "shared memory": 1024,
        "grid": [216, 1, 1],
        "block": [128, 1, 1],
        "est. achieved occupancy %": 25,
    }
    return [
        _event("cuda_runtime", "cudaLaunchKernel", called, 3, correlation=correlation),
        _event("kernel", name, started, 40.125, pid=0, tid=7, **shape),
    ]


def _event(
    kind: str, name: str, start: float, duration: float, pid: int = 4711, tid: int = 4711, **arguments: object
) -> dict[str, Any]:
    at = EPOCH_US + start
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": at, "dur": duration, "args": arguments}
