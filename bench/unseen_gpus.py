"""Leaves each GPU of the published data out in turn, and says how far the estimates for it are off.

    python -m bench.unseen_gpus [--train] [--exports DIR] [--reference DIR] [--rows N]

Nothing of a GPU that is left out is seen: not its ops, not its launches, not those of a board with the same chip; what
is known of it is the catalogue's. ``--train`` first learns the regressors that ship from all of the data, and writes
what the left-out GPUs say of their errors beside them. DIR holds exports ``NAME-LAYERS.onnx`` with one and two layers
of the transformers in NeuSight's models (`bench.transformer_exports` makes them; layers are alike, so that two make
a model of any depth). The reference directory holds ParvaGPU's and iGniter's profiles.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.unseen_models import ModelDeviation, convolutional_errors, transformer_errors
from bench.unseen_training import write_regressors
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.adaptation import adapt_families
from gpuprof.estimators.cross_gpu.cost_model import CostModel
from gpuprof.estimators.cross_gpu.features import bound_times
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.estimators.cross_gpu.training import Trained, bounds_as_measured, chip_of, published_ops, train
from gpuprof.estimators.cross_gpu.training_data import Measured
from gpuprof.estimators.measured.conformal import interval_factor

Array = NDArray[np.float64]
_ADAPTED = (5, 20, 100)
_LEVEL = "90%"


@dataclass(frozen=True, slots=True)
class OpErrors:
    """Predictions of one family on one GPU that was left out.

    Attributes
    ----------
    family, precision, device, split : str
    predicted, measured, bound : ndarray of shape (N,)
        Seconds; the last of the roofline at the data sheet's peaks.
    """

    family: str
    precision: str
    device: str
    split: str
    predicted: Array
    measured: Array
    bound: Array

    def error(self, found: Array | None = None) -> Array:
        """Return the absolute relative errors."""
        return np.abs((self.predicted if found is None else found) / self.measured - 1.0)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="write the regressors that ship, first")
    parser.add_argument("--exports", type=Path, help="directory of exported transformers")
    parser.add_argument("--reference", type=Path, help="directory of ParvaGPU's and iGniter's profiles")
    args = parser.parse_args()
    data = published_ops()
    chips = sorted({chip_of(name) for part in data for name in np.unique(part.device).tolist()})
    left_out = {chip: train(data, excluded=chip) for chip in chips}
    ops = [found for chip in chips for found in op_errors(data, left_out[chip], chip)]
    print_ops(ops)
    models: list[ModelDeviation] = []
    if args.exports:
        models += transformer_errors(args.exports, left_out)
    with tempfile.TemporaryDirectory() as folder:
        networks = convolutional_errors(left_out, Path(folder), args.reference)
    print_models(models)
    print_models(networks)
    spread = {**op_spread(ops), **model_spread([*models, *networks])}
    print_intervals(ops, models, networks)
    print_adaptation(data, left_out)
    if args.train:
        print(write_regressors(train(data), spread))
    return 0


def op_errors(data: Sequence[Measured], trained: Trained, chip: str) -> Iterator[OpErrors]:
    """Yield the errors for the boards of a chip of which nothing was learned."""
    costs = CostModel.of_texts(trained.models, trained.floor_s)
    for part in data:
        for name in np.unique(part.device).tolist():
            if chip_of(name) != chip:
                continue
            rows = part.take(part.device == name)
            predicted, bound = predict_ops(costs, rows, name)
            for split in np.unique(rows.split).tolist():
                kept = rows.split == split
                yield OpErrors(part.name, part.precision, name, split, predicted[kept], rows.seconds[kept], bound[kept])


def predict_ops(costs: CostModel, rows: Measured, name: str) -> tuple[Array, Array]:
    """Return what single ops take as they were measured, launches included, and the roofline, in seconds."""
    rates = rates_of(device(name), rows.precision)
    floor = 0.0 if rows.kernels_only else costs.floor_s.get(rows.name, 0.0)
    kernels = costs.kernel_times(rows.ops, rates, bounds_as_measured(rows, rates))
    return kernels + floor, bound_times(rows.ops, rates).hard_s


def print_ops(errors: Sequence[OpErrors]) -> None:
    """Print mean and median error of each family, by GPU and on average over GPUs."""
    print("\nOps on GPUs left out: mean / median absolute error in %, roofline's mean; rows\n")
    print(f"{'family':22}{'precision':11}{'range':7}{'GPU':14}{'mean':>7}{'median':>8}{'roofline':>10}{'rows':>8}")
    groups: dict[tuple[str, str, str], list[OpErrors]] = defaultdict(list)
    for one in errors:
        groups[one.family, one.precision, one.split].append(one)
    for (family, precision, split), found in groups.items():
        rows = [(100 * e.error().mean(), 100 * np.median(e.error()), 100 * e.error(e.bound).mean()) for e in found]
        for one, (mean, median, roofline) in zip(found, rows, strict=True):
            line = f"{family:22}{precision:11}{split:7}{one.device:14}"
            print(f"{line}{mean:7.1f}{median:8.1f}{roofline:10.1f}{len(one.measured):8}")
        mean, median, roofline = np.mean(rows, axis=0)
        print(f"{family:22}{precision:11}{split:7}{'ALL':14}{mean:7.1f}{median:8.1f}{roofline:10.1f}")


def print_models(errors: Sequence[ModelDeviation]) -> None:
    """Print each model, and the mean of each GPU."""
    if not errors:
        return
    print("\nWhole models on GPUs left out, ms\n")
    for one in errors:
        others = "".join(f"  {name} {100 * (ms / one.measured_ms - 1):+.1f}%" for name, ms in one.others.items())
        line = f"{one.source:12}{one.device:14}{one.model:16}{one.batch:5} {one.runtime:6}{one.measured_ms:10.2f}"
        print(f"{line}{one.predicted_ms:10.2f} {100 * one.error:+7.1f}%{others}")
    groups: dict[tuple[str, str, str], list[ModelDeviation]] = defaultdict(list)
    for one in errors:
        groups[one.source, one.device, one.runtime].append(one)
    for key, found in groups.items():
        means = {"gpuprof": np.mean([abs(e.error) for e in found])}
        for name in found[0].others:
            known = [abs(e.others[name] / e.measured_ms - 1) for e in found if name in e.others]
            means[name] = np.mean(known)
        print(f"{' '.join(key):34}" + "".join(f"  {name} {100 * mean:5.1f}%" for name, mean in means.items()))
    print(f"{'all':34}  gpuprof {100 * np.mean([abs(e.error) for e in errors]):5.1f}%")


def op_spread(errors: Sequence[OpErrors]) -> dict[str, float]:
    """Return the factor of the interval of each family: conformal over the GPUs left out."""
    families = {one.family for one in errors}
    return {family: _factor([one for one in errors if one.family == family]) for family in sorted(families)}


def _factor(errors: Sequence[OpErrors], without: str = "") -> float:
    by_gpu: dict[str, list[float]] = defaultdict(list)
    for one in errors:
        if chip_of(one.device) != without:
            sample = np.log(one.measured / one.predicted)[:: max(1, len(one.measured) // 400)]
            by_gpu[chip_of(one.device)].extend(sample.tolist())
    return interval_factor(by_gpu) or 2.0


def model_spread(errors: Sequence[ModelDeviation], without: str = "") -> dict[str, float]:
    """Return the factor of the interval of each kind of whole models."""
    found = {}
    for kind in sorted({one.kind for one in errors}):
        by_gpu: dict[str, list[float]] = defaultdict(list)
        for one in errors:
            if one.kind == kind and chip_of(one.device) != without:
                by_gpu[f"{chip_of(one.device)} {one.model.split()[0]}"].append(
                    np.log(one.measured_ms / one.predicted_ms)
                )
        if by_gpu:
            found[kind] = interval_factor(by_gpu) or 2.0
    return found


def print_intervals(ops: Sequence[OpErrors], *models: Sequence[ModelDeviation]) -> None:
    """Print coverage and median width of the 90% intervals, each GPU's made without it."""
    print(f"\n{_LEVEL} intervals: coverage, and median half width, of GPUs whose errors were not seen\n")
    for family in sorted({one.family for one in ops}):
        inside, widths = [], []
        for one in ops:
            if one.family == family:
                factor = _factor([e for e in ops if e.family == family], chip_of(one.device))
                inside.extend((np.abs(np.log(one.measured / one.predicted)) <= np.log(factor)).tolist())
                widths.append(factor - 1)
        print(f"{family:24}{100 * np.mean(inside):6.1f}%  +{100 * np.median(widths):.0f}%")
    everything = [one for group in models for one in group]
    for group, name in zip(models, ("transformers", "CNNs and others"), strict=False):
        print_model_intervals(name, group, everything)


def print_model_intervals(name: str, group: Sequence[ModelDeviation], everything: Sequence[ModelDeviation]) -> None:
    """Print the same of whole models."""
    inside, widths = [], []
    for one in group:
        factor = model_spread(everything, chip_of(one.device)).get(one.kind)
        if factor is not None:
            inside.append(abs(np.log(one.measured_ms / one.predicted_ms)) <= np.log(factor))
            widths.append(factor - 1)
    if inside:
        print(f"{name:24}{100 * np.mean(inside):6.1f}%  +{100 * np.median(widths):.0f}%")


def print_adaptation(data: Sequence[Measured], left_out: Mapping[str, Trained]) -> None:
    """Print the mean error of each family after so many rows of the new GPU were seen."""
    print("\nMean absolute error in % after 0, 5, 20 and 100 measured rows of the GPU\n")
    for part in data:
        columns: list[list[float]] = []
        for name in np.unique(part.device).tolist():
            trained = left_out[chip_of(name)]
            rows = part.take(part.device == name)
            predicted, _ = predict_ops(CostModel.of_texts(trained.models, trained.floor_s), rows, name)
            columns.append(_adapted_errors(rows, predicted))
        means = "".join(f"{100 * value:8.1f}" for value in np.mean(columns, axis=0))
        print(f"{part.name:22}{part.precision:10}{means}")


def _adapted_errors(rows: Measured, predicted: Array) -> list[float]:
    found = [float(np.abs(predicted / rows.seconds - 1).mean())]
    for count in _ADAPTED:
        errors = []
        for seed in range(3):
            seen = np.random.default_rng(seed).permutation(len(predicted))[:count]
            others = np.setdiff1d(np.arange(len(predicted)), seen)
            kinds = np.full(len(predicted), part_name(rows))
            shift = adapt_families(kinds[seen], predicted[seen], rows.seconds[seen], predicted)
            errors.append(
                float(np.abs(shift.apply(kinds[others], predicted[others]) / rows.seconds[others] - 1).mean())
            )
        found.append(float(np.mean(errors)))
    return found


def part_name(rows: Measured) -> str:
    """Return what the rows are called in an adaptation."""
    return f"{rows.name} {rows.precision}"


if __name__ == "__main__":
    raise SystemExit(main())
