"""Says how much of the error on GPUs that were left out is theirs, and how much no regressor of these features avoids.

    python -m bench.error_floor [--left-out DIR]

Beside the error on a GPU that was left out stands the error with the GPU's own data: a fifth of the shapes is left out
of all GPUs in turn, and the regressors learn from the others, those of this GPU among them, and know what launching
takes on its machine. What is left comes of what features and trees do not know of a shape: no other GPU could tell.
Both are split: the bias is what one factor for the whole GPU would mend, and the spread is how far apart measurements
are whose features all agree. Attention and products by precision are told apart by the framework that ran them: models
are estimated as by the first of `FRAMEWORKS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.op_training import LAUNCHED_AS, Trained, chip_of, floors, published_ops, train
from bench.published_ops import FRAMEWORKS, MeasuredOps
from bench.unseen_gpus import predict_gpus, predict_ops, train_without
from gpuprof.estimators.cross_gpu.cost_model import CostModel
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable

_FOLDS = 5
#: Columns that make two ops one shape, on whichever GPU and by whichever framework they ran.
_SHAPE = ("b", "m", "n", "k", "elements", "row", "kernel", "image", "width")
_LEAST_GROUP = 50


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--left-out", type=Path, help="where bench.unseen_gpus keeps regressors that saw all but one GPU"
    )
    args = parser.parse_args()
    data = published_ops()
    known = predict_with_own_data(data)
    chips = sorted({chip_of(name) for part in data for name in np.unique(part.device).tolist()})
    trained = {chip: train_without(data, chip, args.left_out) for chip in chips}
    print("Mean absolute error in %; in brackets the median of predicted over measured, less one, and the mean error")
    print("behind a factor that takes it away; spread: of measurements whose features all agree; rows\n")
    columns = f"{'left out':>24}{'its data known':>24}{'spread':>8}{'rows':>8}"
    print(f"{'family':22}{'precision':10}{'range':7}{'GPU':14}{columns}")
    for row in tell_floors(data, known, trained):
        print(row)
    return 0


def tell_floors(data: Sequence[MeasuredOps], known: Sequence[Array], trained: Mapping[str, Trained]) -> Iterator[str]:
    """Yield a line for each family, precision, range and GPU, and for each framework where there are several.

    ``known``: of each part, what `predict_with_own_data` says; ``trained``: chip → regressors that saw nothing of it.
    """
    for part, of_part in zip(data, known, strict=True):
        unseen = predict_left_out(part, trained)
        for name in sorted(set(part.device.tolist())):
            for split in sorted(set(part.split.tolist())):
                rows = np.flatnonzero((part.device == name) & (part.split == split))
                if len(rows):
                    yield _describe(part, rows, unseen, of_part, f"{split:7}{name:14}")
            for number, framework in enumerate(FRAMEWORKS if part.kernels_only else ()):
                rows = np.flatnonzero((part.device == name) & (framework_of(part.ops) == number))
                if len(rows) >= _LEAST_GROUP:
                    yield _describe(part, rows, unseen, of_part, f"  {framework:7}{name:12}")


def predict_left_out(part: MeasuredOps, trained: Mapping[str, Trained]) -> Array:
    """Return the seconds of all ops of a part, each by regressors that saw nothing of its GPU's chip."""
    found = np.zeros(len(part.seconds))
    for chip in sorted({chip_of(name) for name in np.unique(part.device).tolist()}):
        for one in predict_gpus([part], trained[chip], chip):
            found[part.device == one.device] = one.predicted
    return found


def predict_with_own_data(data: Sequence[MeasuredOps]) -> list[Array]:
    """Return the seconds of all ops of each part, each by regressors that saw other shapes on all GPUs."""
    folds = [fold_shapes(part.ops) for part in data]
    found = [np.zeros(len(part.seconds)) for part in data]
    for fold in range(_FOLDS):
        others = [part.take(own != fold) for part, own in zip(data, folds, strict=True)]
        trained = train(others)
        costs = CostModel.of_files(trained.models, trained.floor_s)
        least = {seen.name: floors(seen) for seen in others}
        for part, own, into in zip(data, folds, found, strict=True):
            launched = least.get(LAUNCHED_AS.get(part.name, part.name), {})
            for name in sorted(set(part.device.tolist())):
                rows = np.flatnonzero((part.device == name) & (own == fold))
                if len(rows):
                    into[rows] = predict_ops(part.take(rows), name, costs, launched.get(name)).predicted
    return found


def fold_shapes(ops: OpTable) -> NDArray[np.int64]:
    """Return to which of the folds each op belongs: ops of one shape to the same."""
    _, place = np.unique(_columns(ops, _SHAPE), axis=0, return_inverse=True)
    order = np.random.default_rng(0).permutation(int(place.max()) + 1)
    return np.asarray(order[place.reshape(-1)] % _FOLDS)


def framework_of(ops: OpTable) -> NDArray[np.int64]:
    """Return the position in `FRAMEWORKS` of what ran each of AIConfigurator's ops."""
    attention = ops.family == FAMILIES.index("attention")
    return np.where(attention, ops.stride, ops.extra).astype(np.int64)


def spread_of(ops: OpTable, seconds: Array) -> float | None:
    """Return the mean absolute deviation from the median of ops that agree in every column; None if no two do."""
    names = (*_SHAPE, "extra", "stride", "causal", "read_bytes", "written_bytes")
    _, place = np.unique(_columns(ops, names), axis=0, return_inverse=True)
    place = place.reshape(-1)
    order = np.argsort(place, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(place[order])) + 1)
    parts = [np.abs(np.median(seconds[one]) / seconds[one] - 1.0) for one in groups if len(one) > 1]
    return float(np.concatenate(parts).mean()) if parts else None


def describe_error(predicted: Array, measured: Array) -> str:
    """Return the mean absolute error, the bias, and the error behind the factor that takes the bias away."""
    ratio = predicted / measured
    middle = float(np.median(ratio))
    error, left = np.abs(ratio - 1.0).mean(), np.abs(ratio / middle - 1.0).mean()
    return f"{100 * error:6.1f} ({100 * (middle - 1):+.0f}; {100 * left:.1f})"


def _describe(part: MeasuredOps, rows: NDArray[np.int64], unseen: Array, known: Array, label: str) -> str:
    own = part.take(rows)
    spread = spread_of(own.ops, own.seconds)
    said = f"{part.name:22}{part.precision:10}{label}{describe_error(unseen[rows], own.seconds):>24}"
    seen = f"{describe_error(known[rows], own.seconds) if own.fit_to_learn().all() else 'not learned from':>24}"
    return f"{said}{seen}{'–' if spread is None else f'{100 * spread:.1f}':>8}{len(rows):8}"


def _columns(ops: OpTable, names: Sequence[str]) -> Array:
    return np.column_stack([getattr(ops, name) for name in names])


if __name__ == "__main__":
    raise SystemExit(main())
