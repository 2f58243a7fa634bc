"""Prints what was measured on a GPU beside what `gpuprof estimate` predicts of it without any measurement.

    python -m bench.gpu.predicted [DATABASE]      default: bench/gpu/results/h200/gpuprof-db

The networks are built by ``gpuprof zoo``, half a minute. Rows that ran alone on the device are compared: time of a
batch, and memory of the process. What the host takes and what ONNX Runtime launches for a convolution was read off the
four networks of that database (`gpuprof.estimators.cross_gpu.kernels_by_batch`): of other models, hosts and GPUs it
says little.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from statistics import mean
from typing import Any

import gpuprof
from gpuprof.domain.estimate import Figure
from gpuprof.kernel_db.store import KernelDb

_DATABASE = Path(__file__).parent / "results" / "h200" / "gpuprof-db"
_MIB = 2.0**20


def main(arguments: Sequence[str]) -> int:
    """Print a line for each row and the mean errors of each network."""
    rows = [
        row
        for row in KernelDb(Path(arguments[0]) if arguments else _DATABASE).read_table("models").to_pylist()
        if is_alone(row)
    ]
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    held = 0
    print(f"{'model':15}{'batch':>6}{'share':>7}{'took ms':>10}{'predicted':>11}{'90% interval':>16}{'MiB':>8}{'':>10}")
    for row, latency, memory in predict(rows):
        measured = row["latency_mean_ms"], row["memory_peak_bytes"] / _MIB
        errors[row["model"]].append((latency.value / measured[0] - 1.0, memory.value / _MIB / measured[1] - 1.0))
        low, high = latency.interval or (latency.value, latency.value)
        held += low <= measured[0] <= high
        print(
            f"{row['model']:15}{row['batch']:6}{row['sm_share_pct']:6.0f}%{measured[0]:10.3f}{latency.value:11.3f}"
            f"{f'{low:.2f} … {high:.2f}':>16}{measured[1]:8.0f}{memory.value / _MIB:10.0f}"
        )
    for model, found in sorted(errors.items()):
        times, sizes = (mean(abs(one) for one in column) for column in zip(*found, strict=True))
        print(f"{model}: {len(found)} rows, mean absolute error {times:.1%} in time, {sizes:.1%} in memory")
    print(f"in the 90% interval of the time: {held} of {len(rows)}")
    return 0


def is_alone(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of one process that ran well, with its memory known."""
    return (
        not row["error"] and row["processes"] in (None, 1) and bool(row["latency_mean_ms"] and row["memory_peak_bytes"])
    )


def predict(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Figure, Figure]]:
    """Yield each row with the time and the memory that are predicted without a database, by model, share and batch."""
    os.environ.pop("GPUPROF_DB", None)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # where there is no database
        for model in sorted({row["model"] for row in rows}):
            path = gpuprof.build_model(model, Path(folder) / f"{model}.onnx")
            own = [row for row in rows if row["model"] == model]
            for row in sorted(own, key=lambda one: (-one["sm_share_pct"], one["batch"])):
                share = f"{row['sm_share_pct']:g}"
                found = gpuprof.estimate([path], batches=(row["batch"],), device=row["device"], share=share)
                (said,) = found.estimates
                assert said.memory_bytes is not None
                yield row, said.latency_ms, said.memory_bytes
            path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
