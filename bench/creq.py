"""How far Creq and Mreq of models that nobody profiled are from the thesis's Table A.1, and launches from published.

    python -m bench.creq --exports DIR [--train]

DIR holds the exports of `bench.thesis_exports`. First the launches: occupancy and SM utilisation of the published ops
on each GPU, learned on the others. Then Table A.1: maximum occupancy (MO), its mean weighted by time (WAO), SM
utilisation weighted by time (WSM) and memory on a V100, from launches of which none was on a V100 and the times of
`cross-gpu`. Nothing was learned from the table but the intervals; those that are judged are of the other models. As a
profiler sees it, beside: nsys makes the host's launches about twice as long, and the table's averages are over that
time. ``--train`` writes the regressors that ship, of all GPUs, and the intervals.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bench.launch_training import train_launches
from bench.op_training import chip_of
from bench.published_launches import Launches, published_launches
from bench.unseen_training import ROOT, hash_bytes
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import device
from gpuprof.estimators.creq import LaunchModel, achieved_occupancy_pct, predict_creq_pct
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel, shipped_model
from gpuprof.estimators.cross_gpu.features import rates_of
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.estimators.learned.learned import STACK, fit_regressors, graph_features
from gpuprof.estimators.measured.measured import CREQ_METRICS
from gpuprof.estimators.memory import peak_activation_bytes
from gpuprof.graph.load import load_graph

_FOLDER = ROOT / "creq"
_V100 = "v100-pcie-32"
_LEVEL = 0.9
#: How many times longer the host takes to launch under nsys, by resnet50 and mobilenet_v2 at batch 4 and 8.
_PROFILED_HOST = 2.0
_SHORT = {"max_occupancy": "MO", "wavg_occupancy": "WAO", "wavg_sm_util": "WSM"}


@dataclass(frozen=True, slots=True)
class JudgedModel:
    """A row of Table A.1 beside what is predicted; requirements in percent, by metric.

    Attributes
    ----------
    as_profiled : mapping of str to float
        What is predicted with launches as long as under a profiler.
    memory : tuple of float or None
        Bytes measured, of weights, and of activations alive at once.
    """

    model: str
    batch: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    as_profiled: Mapping[str, float]
    memory: tuple[float, float, float] | None


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", type=Path, required=True, help="what bench.thesis_exports wrote")
    parser.add_argument("--train", action="store_true", help="write the regressors that ship")
    args = parser.parse_args()
    data = published_launches()
    print_launches(data)
    launches = LaunchModel.of_files(train_launches(data, excluded=_V100))
    judged = judge(args.exports, shipped_model(), launches)
    print_models(judged)
    print_errors(judged)
    print_trained(judged, args.exports)
    print_memory(judged)
    if args.train:
        print(write_regressors(train_launches(data), intervals(judged)))
    return 0


def print_launches(data: Sequence[Launches]) -> None:
    """Print for each GPU left out the mean absolute error of occupancy and SM utilisation, in points."""
    print("Launches on GPUs left out: mean, error of occupancy; mean, error of SM utilisation, in points\n")
    for chip in sorted({chip_of(name) for part in data for name in np.unique(part.measured.device).tolist()}):
        model = LaunchModel.of_files(train_launches(data, excluded=chip))
        for part in data:
            for name in np.unique(part.measured.device).tolist():
                if chip_of(name) == chip:
                    _print_launch_errors(part.take(part.measured.device == name), name, model)


def _print_launch_errors(launches: Launches, name: str, model: LaunchModel) -> None:
    gpu = device(name)
    predicted = model.predict(launches.measured.ops, gpu, rates_of(gpu, launches.measured.precision))
    occupancy = achieved_occupancy_pct(launches.warps, launches.waves, gpu)
    used = 100.0 * np.minimum(1.0, launches.waves)
    off = np.abs(predicted.occupancy_pct - occupancy).mean(), np.abs(predicted.sm_utilization_pct - used).mean()
    line = f"{name:14}{launches.measured.name:14}{len(used):7}"
    print(f"{line}{occupancy.mean():8.1f}{off[0]:6.1f}{used.mean():8.1f}{off[1]:6.1f}")


def judge(exports: Path, model: CrossGpuModel, launches: LaunchModel) -> list[JudgedModel]:
    """Return the rows of Table A.1 whose export is there."""
    v100 = device("v100")
    models = []
    for row in v100_profiles().rows:
        path = exports / f"{row.model}.onnx"
        metrics = (row.max_occupancy_pct, row.wavg_occupancy_pct, row.wavg_sm_util_pct)
        if not path.is_file() or None in metrics:
            continue
        graph = load_graph(path, row.batch)
        kernels = list_kernels(graph, "float32", LaunchMode.EAGER)
        usual, as_profiled = (
            predict_creq_pct(kernels, model, launches, v100, "float32", LaunchMode.EAGER, host)
            for host in (1.0, _PROFILED_HOST)
        )
        measured = {metric: value for metric, value in zip(CREQ_METRICS, metrics, strict=True) if value is not None}
        held = None
        if row.memory_pct is not None:
            measured_bytes = row.memory_pct / 100.0 * v100.dram_bytes
            held = (measured_bytes, float(graph.weight_bytes), float(peak_activation_bytes(graph)))
        models.append(JudgedModel(row.model, row.batch, measured, usual, as_profiled, held))
    return models


def print_models(judged: Sequence[JudgedModel]) -> None:
    """Print each row: measured, predicted, predicted as profiled."""
    print("\nTable A.1, no launch on a V100 learned: measured, predicted, predicted as a profiler sees it\n")
    print(
        f"{'model':17}{'batch':>5}"
        + "".join(f"{_SHORT[metric]:>9}{'':12}" for metric in CREQ_METRICS)
        + f"{'memory':>8}"
    )
    for row in judged:
        cells = "".join(
            f"{row.measured[metric]:9.1f}{row.predicted[metric]:6.1f}{row.as_profiled[metric]:6.1f}"
            for metric in CREQ_METRICS
        )
        memory = "" if row.memory is None else f"{100 * (sum(row.memory[1:]) / row.memory[0] - 1):+7.0f}%"
        print(f"{row.model:17}{row.batch:5}{cells}{memory:>9}")


def print_errors(judged: Sequence[JudgedModel]) -> None:
    """Print errors in points, those of the other models' mean, and how often the interval without a model holds."""
    heading = f"{'':6}{'error':>7}{'bias':>7}{'as profiled':>13}{'batch 4':>9}{'mean of others':>16}"
    print(f"\n{heading}{'interval holds':>16}{'width':>7}")
    widths = {name: intervals([row for row in judged if row.model != name]) for name in {o.model for o in judged}}
    for metric in CREQ_METRICS:
        off = np.array([row.predicted[metric] - row.measured[metric] for row in judged])
        profiled = np.array([row.as_profiled[metric] - row.measured[metric] for row in judged])
        small = np.array([row.batch == 4 for row in judged])
        others = [
            np.mean(
                [other.measured[metric] for other in judged if (other.model != row.model) & (other.batch == row.batch)]
            )
            - row.measured[metric]
            for row in judged
        ]
        ends = [(widths[row.model][metric][0], widths[row.model][metric][1]) for row in judged]
        held = [low <= -value <= high for value, (low, high) in zip(off, ends, strict=True)]
        print(
            f"{_SHORT[metric]:6}{np.abs(off).mean():7.1f}{off.mean():+7.1f}{np.abs(profiled).mean():13.1f}"
            f"{np.abs(off[small]).mean():9.1f}{np.abs(others).mean():16.1f}"
            f"{100 * np.mean(held):15.0f}%{np.mean([h - w for w, h in ends]):7.0f}"
        )


def print_trained(judged: Sequence[JudgedModel], exports: Path) -> None:
    """Print errors of the stack of `train`, each model left out, relative to launches and from the graph alone."""
    v100 = device("v100")
    features = np.array([graph_features(load_graph(exports / f"{row.model}.onnx", row.batch), v100) for row in judged])
    models = np.array([row.model for row in judged])
    for metric in CREQ_METRICS:
        measured = np.array([row.measured[metric] for row in judged])
        errors = []
        for base in (np.array([row.predicted[metric] for row in judged]), np.ones(len(judged))):
            off = np.zeros(len(judged))
            for name in sorted(set(models.tolist())):
                rest, left_out = models != name, models == name
                target = np.log(measured[rest] / base[rest])
                stack = fit_regressors(features[rest], target, models[rest].tolist())[STACK]
                predicted = np.minimum(100.0, base[left_out] * np.exp(stack.predict(features[left_out])))
                off[left_out] = predicted - measured[left_out]
            errors.append(np.abs(off).mean())
        print(f"{_SHORT[metric]} trained on the other models: {errors[0]:.1f}, without launches {errors[1]:.1f} points")


def print_memory(judged: Sequence[JudgedModel]) -> None:
    """Print how far the memory is off: as the sum of its parts, and scaled as other models have it."""
    rows = [row for row in judged if row.memory is not None]
    names = sorted({row.model for row in rows})
    fits = {name: fit_memory([row for row in rows if row.model != name]) for name in names}
    ratios = {name: _measured_over_fit([row for row in rows if row.model == name], fits[name]) for name in names}
    held = [
        (min(map(np.min, other_ratios)) <= model_ratios) & (model_ratios <= max(map(np.max, other_ratios)))
        for name, model_ratios in ratios.items()
        if (other_ratios := [ratio for model, ratio in ratios.items() if model != name])
    ]
    plain = 1.0 / _measured_over_fit(rows, np.ones(2)) - 1.0
    scaled = np.concatenate([1.0 / model_ratios - 1.0 for model_ratios in ratios.values()])
    for words, off in (("weights and activations", plain), ("scaled, models left out", scaled)):
        print(
            f"memory, {words}: mean error {100 * np.abs(off).mean():.0f}%, median {100 * np.median(np.abs(off)):.0f}%"
        )
    weights, activations = fit_memory(rows)
    low, high = min(map(np.min, ratios.values())), max(map(np.max, ratios.values()))
    print(f"memory: {weights:.2f} x weights + {activations:.2f} x activations, {low:.2f} to {high:.2f} times")
    print(f"made without a model, that interval holds {100 * np.concatenate(held).mean():.0f}% of its rows")


def _measured_over_fit(rows: Sequence[JudgedModel], fit: NDArray[np.float64]) -> NDArray[np.float64]:
    parts = np.array([row.memory for row in rows])
    return np.asarray(parts[:, 0] / (parts[:, 1:] @ fit))


def fit_memory(rows: Sequence[JudgedModel]) -> NDArray[np.float64]:
    """Return what is held for a byte of weights and for one of activations: least squares of relative errors, (2,)."""
    parts = np.array([row.memory for row in rows])
    counts = Counter(row.model for row in rows)
    weights = np.array([counts[row.model] ** -0.5 for row in rows])
    factors, _ = nnls(parts[:, 1:] / parts[:, :1] * weights[:, None], weights)
    return np.asarray(factors)


def intervals(judged: Sequence[JudgedModel]) -> dict[str, tuple[float, float]]:
    """Return for each metric what measured less predicted lay between, in points; every model counts alike.

    Conformal prediction for groups at each end: one more model, the new one, counts as outside.
    """
    ends = {}
    for metric in CREQ_METRICS:
        groups: dict[str, list[float]] = defaultdict(list)
        for row in judged:
            groups[row.model].append(row.measured[metric] - row.predicted[metric])
        ends[metric] = (-_end([[-x for x in group] for group in groups.values()]), _end([*groups.values()]))
    return ends


def _end(groups: Sequence[Sequence[float]]) -> float:
    """Return what so large a part of all values is below that both ends together leave out a tenth."""
    ordered = sorted((value, 1.0 / len(group)) for group in groups for value in group)
    inside, wanted = 0.0, (1.0 - (1.0 - _LEVEL) / 2.0) * (len(groups) + 1)
    for value, weight in ordered:
        inside += weight
        if inside >= wanted - 1e-9:
            return max(0.0, value)
    return max(0.0, ordered[-1][0])


def write_regressors(files: Mapping[str, bytes], interval: Mapping[str, tuple[float, float]]) -> str:
    """Write the regressors with hash and provenance; return in words where and how large they are."""
    for name, content in files.items():
        (_FOLDER / name).write_bytes(content)
    sources = [ROOT / "neusight" / "ops.parquet", _FOLDER / "kernel_resources.csv", ROOT / "v100_profiles.csv"]
    provenance = {
        "command": "python -m bench.creq --exports DIR --train",
        "library": f"lightgbm {version('lightgbm')}",
        "data": {path.relative_to(ROOT).as_posix(): hash_bytes(path.read_bytes()) for path in sources},
        "sha256": {name: hash_bytes(content) for name, content in files.items()},
        "interval": {metric: [round(low, 2), round(high, 2)] for metric, (low, high) in interval.items()},
    }
    (_FOLDER / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in _FOLDER.iterdir())
    return f"{_FOLDER}: {len(files)} regressors, {size / 1e6:.1f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
