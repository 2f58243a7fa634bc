"""Search for the hyper-parameters of the regressors that `gpuprof train` fits.

    python -m bench.estimators --db DATABASE

Prints the error of each constituent over a grid of its hyper-parameters, architectures left out in groups;
``gpuprof/estimators/learned/learned.py`` holds the values chosen from it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
    """Search over the grids on the ops of a database."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path, required=True, help="kernel database with ops")
    search(parser.parse_args().db)
    return 0


def search(database: Path) -> None:
    """Print the median error over architectures left out for each point of each grid."""
    from sklearn.base import clone
    from sklearn.model_selection import GroupKFold

    from gpuprof.estimators.learned.learned import make_constituents
    from gpuprof.estimators.learned.training_set import expected_ns

    data = _training(database)
    ops = data.ops
    features, target = ops.features, np.log(ops.times_ns / expected_ns(ops.features))
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
    from gpuprof.pipeline.train import TrainOptions, load_training_data

    return load_training_data(TrainOptions(db=database))


if __name__ == "__main__":
    raise SystemExit(main())
