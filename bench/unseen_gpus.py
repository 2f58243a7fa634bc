"""Leaves each GPU of the published data out in turn, and says how far the estimates for it are off.

    python -m bench.unseen_gpus [--train] [--exports DIR] [--reference DIR] [--left-out DIR]

Nothing of a GPU that is left out is seen: not its ops, not its launches, not those of a board with the same chip; what
is known of it is the catalogue's. ``--train`` first learns the regressors that ship from all of the data, and writes
what the left-out GPUs say of their errors beside them. DIR holds exports ``NAME-LAYERS.onnx`` with one and two layers
of the transformers in NeuSight's models (`bench.transformer_exports` makes them; layers are alike, so that two make
a model of any depth). The reference directory holds ParvaGPU's and iGniter's profiles.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.op_training import Trained, bounds_as_measured, chip_of, published_ops, train
from bench.published_ops import MeasuredOps
from bench.unseen_intervals import OpResiduals, fit_scales, print_intervals, sample_residuals
from bench.unseen_models import ModelDeviation, convolutional_errors, ledger_errors, transformer_errors
from bench.unseen_training import write_regressors
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel, name_kinds
from gpuprof.estimators.cross_gpu.features import CostModel, Forests, OpTable, bound_times, rates_of

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OpErrors:
    """Predictions of one family on one GPU that was left out.

    Attributes
    ----------
    family, precision, device : str
    floor_s : float
        What launching and timing takes beside the kernel.
    split : ndarray of shape (N,)
        ``"train"`` or ``"test"``, as `MeasuredOps.split`.
    kernels, bound, measured : ndarray of shape (N,)
        Seconds; ``kernels`` predicted, ``bound`` of the roofline at the data sheet's peaks.
    kinds : ndarray of shape (N,)
        `intervals.name_kinds`.
    ops : OpTable
    """

    family: str
    precision: str
    device: str
    floor_s: float
    split: NDArray[np.str_]
    kernels: Array
    bound: Array
    measured: Array
    kinds: NDArray[np.str_]
    ops: OpTable

    @property
    def predicted(self) -> Array:
        """Seconds with launch."""
        return self.kernels + self.floor_s

    def by_range(self) -> Iterator[OpErrors]:
        """Yield the rows of each range."""
        for split in np.unique(self.split):
            yield self.take(self.split == split)

    def take(self, rows: Any) -> OpErrors:
        """Return the rows at positions, or where a mask is true."""
        columns = {name: getattr(self, name)[rows] for name in ("split", "kernels", "bound", "measured", "kinds")}
        return replace(self, ops=self.ops.take(rows), **columns)

    def residuals(self) -> OpResiduals:
        """Return what intervals are fitted to."""
        name = f"{self.family} {self.precision} {self.split[0]}"
        return sample_residuals(self.device, name, self.kinds, self.measured / self.predicted)

    def error(self, predicted: Array | None = None) -> Array:
        """Return the absolute relative errors."""
        return np.abs((self.predicted if predicted is None else predicted) / self.measured - 1.0)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="write the regressors that ship, first")
    parser.add_argument("--exports", type=Path, help="directory of exported transformers")
    parser.add_argument("--reference", type=Path, help="directory of ParvaGPU's and iGniter's profiles")
    parser.add_argument(
        "--left-out", type=Path, help="keep the regressors that saw all but one GPU here, for a next run"
    )
    args = parser.parse_args()
    if args.train and not (args.exports and args.reference):
        parser.error("--train needs --exports and --reference: intervals are fitted to whole models, too")
    data = published_ops()
    chips = sorted({chip_of(name) for part in data for name in np.unique(part.device).tolist()})
    trained = {chip: train_without(data, chip, args.left_out) for chip in chips}
    predicted = [prediction for chip in chips for prediction in predict_gpus(data, trained[chip], chip)]
    ranges = [chip_range for prediction in predicted for chip_range in prediction.by_range()]
    residuals = [chip_range.residuals() for chip_range in ranges]
    left_out = {
        chip: CrossGpuModel(
            CostModel(Forests(trained[chip].models)),
            fit_scales([residual for residual in residuals if residual.chip != chip], []),
        )
        for chip in chips
    }
    print_ops(ranges)
    models: list[ModelDeviation] = []
    if args.exports:
        models += transformer_errors(args.exports, left_out)
    with tempfile.TemporaryDirectory() as folder:
        networks = convolutional_errors(left_out, Path(folder), args.reference)
        networks += ledger_errors(left_out, Path(folder) / "ledger")
    print_models(models)
    print_models(networks)
    print_intervals(residuals, [*models, *networks])
    if args.train:
        print(write_regressors(train(data), fit_scales(residuals, [*models, *networks])))
    return 0


def train_without(data: Sequence[MeasuredOps], chip: str, folder: Path | None) -> Trained:
    """Return regressors that have not seen a chip, kept in ``folder`` from one run to the next."""
    path = folder / f"{chip}.json" if folder else None
    if path is not None and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Trained({name: b64decode(text) for name, text in kept["models"].items()}, kept["floor_s"])
    trained = train(data, excluded=chip)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        models = {name: b64encode(content).decode() for name, content in trained.models.items()}
        path.write_text(json.dumps({"models": models, "floor_s": dict(trained.floor_s)}), encoding="utf-8")
    return trained


def predict_gpus(data: Sequence[MeasuredOps], trained: Trained, chip: str) -> Iterator[OpErrors]:
    """Yield the predictions for the boards of a chip of which nothing was learned."""
    costs = CostModel(Forests(trained.models))
    for part in data:
        for name in np.unique(part.device).tolist():
            if chip_of(name) == chip:
                rows, rates = part.take(part.device == name), rates_of(device(name), part.precision)
                floor_s = 0.0 if part.kernels_only else trained.floor_s.get(part.name, 0.0)
                kernels = costs.kernel_times(rows.ops, rates, bounds_as_measured(rows, rates, trained.floor_s))
                bound, kinds = bound_times(rows.ops, rates).hard_s, name_kinds(rows.ops, rates.tensor)
                label = (part.name, part.precision, name, floor_s)
                yield OpErrors(*label, rows.split, kernels, bound, rows.seconds, kinds, rows.ops)


def print_ops(errors: Sequence[OpErrors]) -> None:
    """Print mean and median error of each family, by GPU and on average over GPUs."""
    print("\nOps on GPUs left out: mean / median absolute error in %, roofline's mean; rows\n")
    print(f"{'family':22}{'precision':11}{'range':7}{'GPU':14}{'mean':>7}{'median':>8}{'roofline':>10}{'rows':>8}")
    groups: dict[tuple[str, str, str], list[OpErrors]] = defaultdict(list)
    for ops in errors:
        groups[ops.family, ops.precision, str(ops.split[0])].append(ops)
    for (family, precision, split), group in groups.items():
        rows = [(100 * e.error().mean(), 100 * np.median(e.error()), 100 * e.error(e.bound).mean()) for e in group]
        for ops, (mean, median, roofline) in zip(group, rows, strict=True):
            line = f"{family:22}{precision:11}{split:7}{ops.device:14}"
            print(f"{line}{mean:7.1f}{median:8.1f}{roofline:10.1f}{len(ops.measured):8}")
        mean, median, roofline = np.mean(rows, axis=0)
        print(f"{family:22}{precision:11}{split:7}{'ALL':14}{mean:7.1f}{median:8.1f}{roofline:10.1f}")


def print_models(errors: Sequence[ModelDeviation]) -> None:
    """Print each model, and the mean of each GPU."""
    if not errors:
        return
    print("\nWhole models on GPUs left out, ms\n")
    for row in errors:
        other_errors = "".join(f"  {name} {100 * (ms / row.measured_ms - 1):+.1f}%" for name, ms in row.others.items())
        line = f"{row.source:12}{row.device:14}{row.model:16}{row.batch:5} {row.runtime:6}{row.measured_ms:10.2f}"
        print(f"{line}{row.predicted_ms:10.2f} {100 * row.error:+7.1f}%{other_errors}")
    groups: dict[tuple[str, str, str], list[ModelDeviation]] = defaultdict(list)
    for row in errors:
        groups[row.source, row.device, row.runtime].append(row)
    for key, group in groups.items():
        means = {"gpuprof": np.mean([abs(e.error) for e in group])}
        for name in group[0].others:
            off = [abs(e.others[name] / e.measured_ms - 1) for e in group if name in e.others]
            means[name] = np.mean(off)
        print(f"{' '.join(key):34}" + "".join(f"  {name} {100 * mean:5.1f}%" for name, mean in means.items()))
    print(f"{'all':34}  gpuprof {100 * np.mean([abs(e.error) for e in errors]):5.1f}%")


if __name__ == "__main__":
    raise SystemExit(main())
