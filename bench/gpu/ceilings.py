"""Measures what a device can do at best, with PyTorch: matrix products, a pass over memory, copies from the host.

    python -m bench.gpu.ceilings [--device cuda|cpu] [--db DIRECTORY]

Prints one JSON object, and with --db keeps it in the table ``devices``, where the roofline finds it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

REPEATS = 20


def main() -> int:
    """Measure, print and keep; 1 where there is no PyTorch or no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=8192, help="side of the matrices")
    parser.add_argument("--mib", type=int, default=2048, help="memory that a pass reads and writes")
    parser.add_argument("--db", type=Path)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("torch is not installed: no ceilings", file=sys.stderr)
        return 1
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU: no ceilings", file=sys.stderr)
        return 1
    found = measure(torch, options.device, options.size, options.mib * 2**20)
    print(json.dumps(found, indent=1))
    if options.db is not None:
        keep(options.db, options.device, found)
    return 0


def measure(torch: Any, device: str, size: int, traffic: int) -> dict[str, float]:
    """Return FLOP/s by type, bytes/s of memory, and on a GPU bytes/s from the host."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: dict[str, float] = {}
    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if device == "cpu":
        types = {"float32": torch.float32}
    for name, dtype in types.items():
        for tf32 in (False, True) if name == "float32" and device == "cuda" else (False,):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            result = torch.empty(size, size, device=device, dtype=dtype)
            seconds = least(partial(torch.mm, left, right, out=result), wait)
            found[f"{'tfloat32' if tf32 else name}_flops_per_s"] = 2.0 * size**3 / seconds
    vector = torch.zeros(traffic // 8, device=device, dtype=torch.float32)
    target = torch.empty_like(vector)
    found["dram_bytes_per_s"] = 2.0 * vector.numel() * 4 / least(lambda: target.copy_(vector), wait)
    if device == "cuda":
        host = torch.zeros(256 * 2**20 // 4, dtype=torch.float32).pin_memory()
        there = torch.empty_like(host, device=device)
        found["pcie_bytes_per_s"] = host.numel() * 4 / least(lambda: there.copy_(host), wait)
    return found


def least(work: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return the least of some times of ``work`` in seconds, done when ``wait`` returns."""
    times = []
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def keep(path: Path, kind: str, found: dict[str, Any]) -> None:
    """Append a run with the ceilings to the database."""
    from gpuprof.kernel_db.schema import DeviceRow, RunRow
    from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
    from gpuprof.local_device import local_cpu, local_gpus
    from gpuprof.profiling.nvml import idle_figures

    device = local_gpus()[0] if kind == "cuda" else local_cpu()
    started = datetime.now(UTC)
    run_id = new_run_id(started)
    row = DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        clock_mhz=device.clock_mhz,
        dram_bytes=device.dram_bytes,
        l2_bytes=device.l2_bytes,
        compute_capability=device.compute_capability,
        max_power_w=device.max_power_w,
        idle_power_w=idle_figures().power_w,
        measured=True,
        source="measured: torch.mm of square matrices, Tensor.copy_ on it and from pinned memory; best of repeats",
        **found,
    )
    KernelDb.create(path).append(Run(RunRow(run_id, started, device.name, "ceilings", ""), devices=[row]))


if __name__ == "__main__":
    sys.exit(main())
