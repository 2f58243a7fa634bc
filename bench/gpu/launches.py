"""Prints what the constants of ``--runtime onnxruntime`` were read off: kernels that were recorded on a GPU.

    python -m bench.gpu.launches [DATABASE]      default: bench/gpu/results/h200/gpuprof-db

For each network what the host takes for a kernel at batch 1, copies left out; for each batch what follows from the
recorded time of its kernels, from that host and from the copies, where the longer of kernels and host counts, or the
root of the sum of their squares; for each share what cuDNN's kernel for biases takes, as recorded and as predicted.
Half a minute: the networks are built by ``gpuprof zoo``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import gpuprof
from bench.gpu.predicted import DATABASE, is_alone
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.features import rates_of
from gpuprof.estimators.cross_gpu.kernels import (
    BIAS_OF_CONVOLUTION,
    LaunchMode,
    copy_seconds,
    host_seconds,
    list_kernels,
)
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import KernelDb

Row = Mapping[str, Any]
_RUNTIME = LaunchMode.ONNXRUNTIME
_BIAS_KERNEL = "op_generic_tensor_kernel"


def main(arguments: Sequence[str]) -> int:
    """Print the three tables."""
    database = KernelDb(Path(arguments[0]) if arguments else DATABASE)
    rows = [row for row in database.read_table("models").to_pylist() if is_alone(row)]
    kernels = database.read_table("kernels").to_pylist()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: gpuprof.build_model(name, Path(folder) / f"{name}.onnx") for name in {row["model"] for row in rows}
        }
        whole = sorted(
            (row for row in rows if row["sm_share_pct"] == 100.0), key=lambda row: (row["model"], row["batch"])
        )
        print_batches(whole, kernels, files)
        print_biases(sorted(rows, key=lambda row: (row["model"], row["batch"], row["sm_share_pct"])), kernels, files)
    return 0


def print_batches(rows: Sequence[Row], kernels: Sequence[Row], files: Mapping[str, Path]) -> None:
    """Print what the host takes for a kernel, and what follows for each batch on the whole device."""
    print(f"{'model':14}{'batch':>6}{'listed':>7}{'us each':>8}{'took ms':>9}{'kernels':>9}{'longer':>9}{'root':>9}")
    longer_off, root_off = [], []
    for row in rows:
        listed = list_kernels(load_graph(files[row["model"]], row["batch"]), "tfloat32", _RUNTIME)
        took_ms, copied_ms = row["latency_mean_ms"], 1e3 * copy_seconds(listed, _RUNTIME)
        busy_ms, host_ms = _sum_ms(row, kernels), 1e3 * host_seconds(listed, _RUNTIME)
        both = [copied_ms + float(busy) for busy in (max(busy_ms, host_ms), np.hypot(busy_ms, host_ms))]
        longer_off.append(abs(both[0] / took_ms - 1.0))
        root_off.append(abs(both[1] / took_ms - 1.0))
        each = f"{1e3 * (took_ms - copied_ms) / sum(listed.count):.1f}" if row["batch"] == 1 else ""
        print(
            f"{row['model']:14}{row['batch']:6}{sum(listed.count):7}{each:>8}{took_ms:9.3f}{busy_ms:9.3f}"
            f"{both[0]:9.3f}{both[1]:9.3f}"
        )
    print(f"median error, with copies: {median(longer_off):.1%} the longer of both, {median(root_off):.1%} the root")


def print_biases(rows: Sequence[Row], kernels: Sequence[Row], files: Mapping[str, Path]) -> None:
    """Print the time of the kernels that add biases of convolutions, as recorded and as predicted."""
    print(f"\n{'model':14}{'batch':>6}{'share':>6}{'biases ms':>11}{'predicted':>11}")
    for row in rows:
        recorded_ms = _sum_ms(row, kernels, _BIAS_KERNEL)
        if not recorded_ms:
            continue
        listed = list_kernels(load_graph(files[row["model"]], row["batch"]), "tfloat32", _RUNTIME)
        times = shipped_model().kernel_times(
            listed.ops, rates_of(device(row["device"]), "tfloat32", Share(row["sm_share_pct"]))
        )
        said_ms = 1e3 * float(times[np.array(listed.op_types) == BIAS_OF_CONVOLUTION].sum())
        print(f"{row['model']:14}{row['batch']:6}{row['sm_share_pct']:5.0f}%{recorded_ms:11.3f}{said_ms:11.3f}")


def _sum_ms(row: Row, kernels: Sequence[Row], name: str = "") -> float:
    """Return the time of the kernels of one batch whose name contains ``name``, the mean of those recorded."""
    launches = [kernel for kernel in kernels if kernel["run_id"] == row["run_id"] and kernel["batch"] == row["batch"]]
    repeats = len({kernel["repeat"] for kernel in launches}) or 1
    return float(sum(kernel["duration_ns"] for kernel in launches if name in kernel["name"])) / 1e6 / repeats


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
