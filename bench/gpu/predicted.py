"""Prints what was measured on a GPU beside what `gpuprof estimate` predicts of it without any measurement.

    python -m bench.gpu.predicted [DATABASE]      default: bench/gpu/results/h200/gpuprof-db

The networks are built by ``gpuprof zoo``, half a minute. Rows that ran alone on the device are compared: time of a
batch, memory of the process, occupancy and SM utilisation averaged over the time (WAO, WSM). What the host takes and
what ONNX Runtime launches for a convolution was read off the four networks of that database
(`gpuprof.estimators.cross_gpu.kernels`): of other models, hosts and GPUs it says little.
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
from gpuprof.domain.estimate import Estimate
from gpuprof.kernel_db.store import KernelDb

DATABASE = Path(__file__).parent / "results" / "h200" / "gpuprof-db"
_MIB = 2.0**20
_AVERAGES = ("wavg_occupancy", "wavg_sm_util")


def main(arguments: Sequence[str]) -> int:
    """Print a line for each row and the mean errors of each network."""
    path = Path(arguments[0]) if arguments else DATABASE
    rows = [row for row in KernelDb(path).read_table("models").to_pylist() if is_alone(row)]
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    inside = 0
    print(
        f"{'model':14}{'batch':>6}{'share':>6}{'took ms':>9}{'predicted':>10}{'90% interval':>16}{'MiB':>7}{'':>7}",
        end="",
    )
    print(f"{'WAO %':>7}{'':>6}{'WSM %':>7}")
    for row, estimate in predict(rows):
        took_ms, low, high = row["latency_mean_ms"], *(estimate.latency_ms.interval or (0.0, 0.0))
        inside += low <= took_ms <= high
        assert estimate.memory_bytes is not None
        by_metric = errors[row["model"]]
        by_metric["time"].append(estimate.latency_ms.value / took_ms - 1.0)
        by_metric["memory"].append(estimate.memory_bytes.value / row["memory_peak_bytes"] - 1.0)
        held_mib, said_mib = row["memory_peak_bytes"] / _MIB, estimate.memory_bytes.value / _MIB
        print(
            f"{row['model']:14}{row['batch']:6}{row['sm_share_pct']:5.0f}%{took_ms:9.3f}{estimate.latency_ms.value:10.3f}"
            f"{f'{low:.2f} … {high:.2f}':>16}{held_mib:7.0f}{said_mib:7.0f}",
            end="",
        )
        for metric in _AVERAGES:
            figure, measured = estimate.creq(metric), row[f"{metric}_pct"]
            if figure is not None and measured is not None:  # under a share nothing is predicted
                by_metric[metric].append(figure.value - measured)
                print(f"{measured:7.1f}{figure.value:6.1f}", end="")
        print(flush=True)
    for model, by_metric in sorted(errors.items()):
        time, memory, wao, wsm = (mean(map(abs, by_metric[name])) for name in ("time", "memory", *_AVERAGES))
        print(
            f"{model}: {len(by_metric['time'])} rows, mean absolute error {time:.1%} in time, {memory:.1%} in memory, "
            f"{wao:.1f} points in WAO, {wsm:.1f} in WSM"
        )
    print(f"in the 90% interval of the time: {inside} of {len(rows)}")
    return 0


def is_alone(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of one process that ran well, with its memory known."""
    return (
        not row["error"] and row["processes"] in (None, 1) and bool(row["latency_mean_ms"] and row["memory_peak_bytes"])
    )


def predict(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Estimate]]:
    """Yield each row with what is predicted without a database, by model, share and batch."""
    os.environ.pop("GPUPROF_DB", None)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # where there is no database
        for model in sorted({row["model"] for row in rows}):
            path = gpuprof.build_model(model, Path(folder) / f"{model}.onnx")
            model_rows = [row for row in rows if row["model"] == model]
            for row in sorted(model_rows, key=lambda profiled: (-profiled["sm_share_pct"], profiled["batch"])):
                share = f"{row['sm_share_pct']:g}"
                result = gpuprof.estimate([path], batches=(row["batch"],), device=row["device"], share=share)
                yield row, result.estimates[0]
            path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
