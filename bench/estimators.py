"""Speed of estimates, and the search for the regressors' hyper-parameters.

    python -m bench.estimators [--db DATABASE] [--search]

Without options, prints how long estimates take in a warm process: from a synthetic database (measured and
interpolated points), from the roofline, and the queueing model. With --db, also of the regressors trained on it.
With --search, prints the error of each constituent over a grid of its hyper-parameters, architectures left out in
groups; the values written into ``gpuprof/estimators/learned/regressors.py`` are chosen from it once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from gpuprof.domain.catalogue import device as catalogue_device
from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

BATCHES = (1, 2, 4, 8, 16, 32)
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "lasso": {"lasso__alpha": (0.001, 0.003, 0.01, 0.03)},
    "kernel_ridge": {
        "sampledkernelridge__alpha": (0.03, 0.1, 0.3, 1.0),
        "sampledkernelridge__gamma": (0.005, 0.02, 0.05),
    },
    "gradient_boosting": {"max_depth": (3, 4, 6), "n_estimators": (60, 100, 200), "min_samples_leaf": (4, 12)},
    "xgboost": {"max_depth": (3, 5, 7), "n_estimators": (100, 200, 400), "min_child_weight": (1, 4, 12)},
}


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--search", action="store_true")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as directory:
        measured_speed(Path(directory))
        roofline_speed(Path(directory))
    queueing_speed()
    if arguments.db is not None:
        learned_speed(arguments.db)
        if arguments.search:
            search(arguments.db)
    return 0


def measured_speed(folder: Path) -> None:
    """Print the speed of measured and interpolated points."""
    gpu = catalogue_device("a100-80")
    rows = [
        ModelRow("r", f"net{i}", gpu.name, batch, share, latency_mean_ms=1.0 + batch * 100.0 / share)
        for i in range(20)
        for batch in BATCHES
        for share in (25.0, 50.0, 100.0)
    ]
    db = KernelDb.create(folder / "db")
    db.append(Run(RunRow("r", datetime.now(UTC), gpu.name, "bench", "any"), models=rows))
    estimator = DatabaseEstimator(db)
    points = [
        (f"net{i}", b, Share(s))
        for i in range(20)
        for b in (1, 2, 3, 5, 8, 12, 16, 24, 30, 32)
        for s in (25, 40, 50, 70, 100)
    ]
    start = time.perf_counter()
    for name, batch, share in points:
        estimator.estimate(name, gpu, batch, share)
    show(f"{len(points)} points of the database, first time", time.perf_counter() - start)
    show("a model at six batch sizes, measured", median_s(lambda: six(DatabaseEstimator(db), "net1", gpu), 5))


def roofline_speed(folder: Path) -> None:
    """Print the speed of the roofline on ResNet-50 for a GPU that was never profiled."""
    gpu = catalogue_device("a100-80")
    path = folder / "resnet50.onnx"
    build(find_architecture("resnet50"), path)
    estimator = DatabaseEstimator(None)
    show("ResNet-50, file read, roofline at six batch sizes", time_call(lambda: six(estimator, str(path), gpu)))
    shares = itertools.count(1)
    show("the same at another share", median_s(lambda: six(estimator, str(path), gpu, Share(next(shares) / 10)), 9))


def six(estimator: DatabaseEstimator, model: str, device: Device, share: Share | None = None) -> None:
    """Estimate a model at six batch sizes."""
    for batch in BATCHES:
        estimator.estimate(model, device, batch, share or Share())


def queueing_speed() -> None:
    """Print the speed of the queueing model, no result seen before."""
    queue = BatchQueue()
    for processes, batch, wait, cv in ((1, 1, 0.0, 0.1), (1, 8, 0.5, 0.1), (1, 32, 0.5, 0.1), (2, 8, 0.5, 0.1)):
        latency = tuple(10.0 * (0.3 + 0.7 * n / batch) for n in range(1, batch + 1))
        server = BatchServer(latency, batch, 10.0 * wait, processes, cv)
        loads = iter(np.linspace(0.2, 0.9, 15))
        queue.sojourn(Arrivals(0.1 * server.capacity_rps), server)
        seconds = median_s(lambda: queue.sojourn(Arrivals(next(loads) * server.capacity_rps), server), 15)  # noqa: B023
        show(f"queueing, {processes} process(es), batch {batch}, a rate never asked", seconds)


def learned_speed(database: Path) -> None:
    """Print the speed of the stack on a graph in memory."""
    from gpuprof.estimators.learned.learned import fit

    data = _training(database)
    model = fit(data)
    name = max(data.architectures, key=lambda one: one == "resnet50")
    graphs = {case.graph.batch: case.graph for case in data.cases if case.graph.name == name}
    model.latencies_ms(list(graphs.values()), Share())
    seconds = median_s(lambda: model.latencies_ms(list(graphs.values()), Share()), 15)
    show(f"stack, {name} at {len(graphs)} batch sizes", seconds)


def search(database: Path) -> None:
    """Print the median error over architectures left out for each point of each grid."""
    from sklearn.base import clone
    from sklearn.model_selection import GroupKFold

    from gpuprof.estimators.learned.expected_time import expected_features, expected_ns, fit_element_ns
    from gpuprof.estimators.learned.regressors import make_constituents

    data = _training(database)
    ops = data.ops
    element_ns = fit_element_ns(ops.costs, ops.times_ns, ops.groups)
    features = np.hstack([ops.features, expected_features(ops.costs, element_ns)])
    target = np.log(ops.times_ns / expected_ns(ops.costs, element_ns))
    folds = list(GroupKFold(min(6, len(data.architectures))).split(features, groups=ops.groups))
    for name, regressor in make_constituents().items():
        for values in _grid(GRIDS[name]):
            errors = []
            for train, test in folds:
                fitted = clone(regressor).set_params(**values).fit(features[train], target[train])
                errors += list(np.abs(np.exp(fitted.predict(features[test]) - target[test]) - 1.0))
            print(
                f"{name:18} {values}  median {100 * np.median(errors):.1f}%  p95 {100 * np.percentile(errors, 95):.0f}%"
            )


def _grid(grid: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _training(database: Path) -> Any:
    from gpuprof.pipeline.train import load_training_data

    return load_training_data(database, None)


def time_call(call: Callable[[], object]) -> float:
    """Return how long one call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median of ``repeats`` calls, in seconds."""
    return statistics.median(time_call(call) for _ in range(repeats))


def show(what: str, seconds: float) -> None:
    """Print a line."""
    print(f"{what:60} {1000 * seconds:9.2f} ms")


if __name__ == "__main__":
    raise SystemExit(main())
