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
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

REPEATS = 20
COPIED_BYTES = 256 * 2**20


def main() -> int:
    """Measure, print and keep; 1 where there is no PyTorch or no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=8192, help="side of the matrices")
    parser.add_argument("--mib", type=int, default=2048, help="memory that a pass reads and writes")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--as-gpu", action="store_true", help="keep them under the GPU's name, in a rehearsal")
    options = parser.parse_args()
    from gpuprof.profiling.gpu.nvml import idle_figures

    try:
        import torch
    except ImportError:
        print("torch is not installed: no ceilings", file=sys.stderr)
        return 1
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU: no ceilings", file=sys.stderr)
        return 1
    idle_power_w = idle_figures().power_w  # before anything of ours runs: a GPU cools down for some seconds
    ceilings = measure(torch, options.device, options.size, options.mib * 2**20)
    print(json.dumps({**ceilings, "idle_power_w": idle_power_w}, indent=1))
    if options.db is not None:
        keep(options.db, "cuda" if options.as_gpu else options.device, ceilings, idle_power_w)
    return 0


def measure(torch: Any, device: str, size: int, traffic: int) -> dict[str, float]:
    """Return FLOP/s by type, bytes/s of memory, and on a GPU bytes/s of the link, of pinned and of pageable memory.

    All values are random: on zeros a GPU draws less power and runs faster than on data.
    """
    timed = partial(least, torch, device)
    ceilings: dict[str, float] = {}
    for name, dtype, tf32 in products(torch, device):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        result = torch.empty(size, size, device=device, dtype=dtype)
        ceilings[f"{name}_flops_per_s"] = 2.0 * size**3 / timed(partial(torch.mm, left, right, out=result))
    torch.backends.cuda.matmul.allow_tf32 = False
    vector = torch.rand(traffic // 8, device=device, dtype=torch.float32)
    target = torch.empty_like(vector)
    ceilings["dram_bytes_per_s"] = 2.0 * vector.numel() * 4 / timed(partial(target.copy_, vector))
    if device == "cuda":
        ceilings |= link(torch, timed)
    return ceilings


def products(torch: Any, device: str) -> list[tuple[str, Any, bool]]:
    """Return the kinds of arithmetic: name, type of the values, whether products are in TF32."""
    kinds = [("float32", torch.float32, False)]
    if device == "cuda":
        kinds += [("tfloat32", torch.float32, True), ("float16", torch.float16, False)]
        kinds += [("bfloat16", torch.bfloat16, False)]
    return kinds


def link(torch: Any, timed: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Return bytes/s between host and GPU: from and to pinned memory under the database's names, and pageable."""
    pageable = torch.rand(COPIED_BYTES // 4, dtype=torch.float32)
    there = torch.empty_like(pageable, device="cuda")
    pinned = pageable.pin_memory()
    back = torch.empty_like(pageable)
    return {
        "pcie_bytes_per_s": COPIED_BYTES / timed(partial(there.copy_, pinned, non_blocking=True)),
        "pcie_d2h_bytes_per_s": COPIED_BYTES / timed(partial(pinned.copy_, there, non_blocking=True)),
        "pageable_h2d_bytes_per_s": COPIED_BYTES / timed(partial(there.copy_, pageable)),
        "pageable_d2h_bytes_per_s": COPIED_BYTES / timed(partial(back.copy_, there)),
    }


def least(torch: Any, device: str, work: Callable[[], Any]) -> float:
    """Return the least of some times of ``work`` in seconds: on a GPU between two of its own events."""
    times = []
    for _ in range(REPEATS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        else:
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return min(times[2:])


def keep(path: Path, kind: str, ceilings: dict[str, Any], idle_power_w: float | None) -> None:
    """Append a run with the ceilings to the database."""
    from gpuprof.kernel_db.schema import DeviceRow, RunRow
    from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
    from gpuprof.machine.cpu import local_cpu
    from gpuprof.machine.gpu import local_gpus

    device = local_gpus()[0] if kind == "cuda" else local_cpu()
    started = datetime.now(UTC)
    run_id = new_run_id(started)
    columns = {field.name for field in fields(DeviceRow)}
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
        idle_power_w=idle_power_w,
        pcie_memory="pinned" if "pcie_bytes_per_s" in ceilings else None,
        measured=True,
        source="measured: torch.mm of square matrices, Tensor.copy_ on it and from pinned memory; best of repeats",
        **{name: value for name, value in ceilings.items() if name in columns},
    )
    KernelDb.create(path).append(Run(RunRow(run_id, started, device.name, "ceilings", ""), devices=[row]))


if __name__ == "__main__":
    sys.exit(main())
