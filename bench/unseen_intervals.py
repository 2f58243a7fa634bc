"""Fits the intervals of GPUs that nobody measured, and judges them on GPUs and architectures left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from bench.op_training import chip_of
from bench.unseen_models import ModelDeviation
from gpuprof.domain.catalogue import device
from gpuprof.estimators.conformal import LEVEL, quantile
from gpuprof.estimators.cross_gpu.cross_gpu import ANY_MODEL, ErrorScales, generation_of

Array = NDArray[np.float64]
_SAMPLE = 400
#: Fewer architectures of a kind, each on one GPU, say nothing of the next: those of all kinds do.
_ENOUGH = 4
_GENERATIONS = ("", " old")
#: Hosts of published tables launch the same kernels in times that differ by a factor of two.
_HOST = 0.693147


@dataclass(frozen=True, slots=True)
class OpResiduals:
    """Errors of one family in one precision and range on one GPU that was left out.

    Attributes
    ----------
    chip, generation, name : str
        ``name`` tells groups of one chip apart.
    kinds : ndarray of shape (N,)
        `intervals.name_kinds`.
    sizes : ndarray of shape (N,)
        Absolute logarithms of measured over predicted.
    """

    chip: str
    generation: str
    name: str
    kinds: NDArray[np.str_]
    sizes: Array


def sample_residuals(gpu: str, name: str, kinds: NDArray[np.str_], ratio: Array) -> OpResiduals:
    """Return the residuals of ops whose measured over predicted times are ``ratio``, a few hundred of them."""
    kept = slice(None, None, max(1, len(ratio) // _SAMPLE))
    return OpResiduals(chip_of(gpu), generation_of(device(gpu)), name, kinds[kept], np.abs(np.log(ratio[kept])))


def fit_op_scales(groups: Iterable[OpResiduals]) -> dict[str, float]:
    """Return the error that nine of ten ops of each kind keep within, each group counting alike."""
    by_kind: dict[str, list[tuple[Array, Array]]] = defaultdict(list)
    for group in groups:
        for kind in np.unique(group.kinds):
            sizes = group.sizes[group.kinds == kind]
            by_kind[str(kind)].append((sizes, np.full(len(sizes), 1.0 / len(group.sizes))))
    return {kind: _quantile(pairs) for kind, pairs in sorted(by_kind.items())}


def fit_scales(groups: Sequence[OpResiduals], models: Sequence[ModelDeviation]) -> ErrorScales:
    """Return the intervals that ``groups`` and ``models`` speak for.

    Scales are of GPUs since Volta. How many of them hold nine of ten ops, or models, is conformal: each GPU by the
    scales without it, every family of a GPU (every architecture on a GPU) counting once.
    """
    modern = [group for group in groups if not group.generation]
    scales = fit_op_scales(modern)
    without = {
        chip: fit_op_scales([group for group in modern if group.chip != chip]) for chip in {o.chip for o in groups}
    }
    op_factors: dict[str, float] = {}
    for generation in _GENERATIONS:
        units = {
            f"{group.chip} {group.name}": (group.sizes / _scale_ops(without[group.chip], group.kinds)).tolist()
            for group in groups
            if group.generation == generation
        }
        op_factors[generation] = _conformal(units, op_factors.get("", 1.0))
    return ErrorScales(scales, op_factors, _fit_models(models, without, scales), _HOST)


def _fit_models(
    models: Sequence[ModelDeviation], without: Mapping[str, Mapping[str, float]], scales: Mapping[str, float]
) -> dict[str, float]:
    def size(deviation: ModelDeviation) -> float:
        scale = _plain(without.get(chip_of(deviation.device), scales)).mean_scale(deviation.parts.by_kind)
        if deviation.log_error <= 0.0:
            return -deviation.log_error / scale
        # At the upper end the host's time comes before the kernels' (`ErrorScales.widen_model`).
        kernels_s = deviation.parts.kernels_s
        return log(max(deviation.measured_ms / 1e3 - deviation.parts.host_s, kernels_s) / kernels_s) / scale

    factors: dict[str, float] = {}
    for generation in _GENERATIONS:
        generation_models = [model for model in models if not model.by_host and model.generation == generation]
        everything = _group(generation_models, lambda model: True, size)
        factors[ANY_MODEL + generation] = _conformal(everything, factors.get(ANY_MODEL, 1.0))
        for kind in sorted({model.kind for model in generation_models}):
            units = _group(generation_models, lambda model, kind=kind: model.kind == kind, size)  # type: ignore[misc]
            if len(units) >= _ENOUGH:
                of_kind = (model for model in generation_models if model.kind == kind)
                factors[kind + generation] = max(_conformal(units, 1.0), _hold_tables(of_kind, size))
    return factors


def _group(
    models: Iterable[ModelDeviation], wanted: Callable[[ModelDeviation], bool], size: Callable[[ModelDeviation], float]
) -> dict[str, list[float]]:
    units: dict[str, list[float]] = defaultdict(list)
    for model in models:
        if wanted(model):
            units[f"{chip_of(model.device)} {model.model.split()[0]}"].append(size(model))
    return units


def _hold_tables(models: Iterable[ModelDeviation], size: Callable[[ModelDeviation], float]) -> float:
    """Return what holds nine of ten models of one table more, each of a source, board, runtime and precision.

    The errors of a table are alike, so that nine of ten models of all tables may be six of ten of the next. The
    quantile over tables is conformal: of few tables, the largest.
    """
    tables: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for model in models:
        tables[model.source, model.device, model.runtime].append(size(model))
    each = [_quantile([(np.array(sizes), np.ones(len(sizes)))]) for sizes in tables.values()]
    return quantile(each, LEVEL) or 0.0


def _plain(scales: Mapping[str, float]) -> ErrorScales:
    return ErrorScales(scales, {}, {}, 0.0)


def _conformal(units: Mapping[str, Sequence[float]], otherwise: float) -> float:
    """Return what holds nine of ten of one unit more; of too few units for that, nine of ten of theirs."""
    if not units:
        return otherwise
    level = LEVEL * (1.0 + 1.0 / len(units))
    pairs = [(np.array(sizes), np.full(len(sizes), 1.0 / len(sizes))) for sizes in units.values()]
    return _quantile(pairs, level if level < 1.0 else LEVEL)


def _quantile(pairs: Sequence[tuple[Array, Array]], level: float = LEVEL) -> float:
    """Return the weighted quantile of sizes with weights."""
    sizes, weights = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.argsort(sizes)
    inside = np.cumsum(weights[order])
    place = int(np.searchsorted(inside, level * inside[-1] - 1e-9))
    return round(float(sizes[order][min(place, len(order) - 1)]), 4)


def print_intervals(groups: Sequence[OpResiduals], models: Sequence[ModelDeviation]) -> None:
    """Print coverage and median half width of the 90% intervals of GPUs, and of architectures, that were not seen."""
    print(f"\n{LEVEL:.0%} intervals: coverage and median half width, fitted without the GPU's own errors\n")
    chips = {group.chip for group in groups} | {chip_of(model.device) for model in models}
    fitted = {
        chip: fit_scales(
            [group for group in groups if group.chip != chip],
            [model for model in models if chip_of(model.device) != chip],
        )
        for chip in chips
    }
    rows = [(group.name, group.generation, *_judge_ops(group, fitted[group.chip])) for group in groups]
    _print_rows("ops", rows)
    _print_rows("models", [_judge_model(model, fitted[chip_of(model.device)]) for model in models])
    architectures = sorted({model.model.split()[0] for model in models})
    without = {
        name: fit_scales(groups, [model for model in models if model.model.split()[0] != name])
        for name in architectures
    }
    rows = [_judge_model(model, without[model.model.split()[0]]) for model in models]
    _print_rows("models, the architecture left out on all GPUs", rows)


def _scale_ops(scales: Mapping[str, float], kinds: NDArray[np.str_]) -> Array:
    """Return the scale of each op by its kind; for unmeasured kinds, the largest scale."""
    most = max(scales.values(), default=1.0)
    return np.array([scales.get(str(kind), most) for kind in kinds], dtype=float)


def widen_ops(scales: ErrorScales, kinds: NDArray[np.str_], generation: str) -> Array:
    """Return for each op the logarithm of the factor f so that [t / f, t f] holds nine of ten ops."""
    return _scale_ops(scales.ops, kinds) * scales.op_factors[generation]


_Judged = tuple[str, str, float, float]


def _judge_ops(group: OpResiduals, scales: ErrorScales) -> tuple[float, float]:
    widths = widen_ops(scales, group.kinds, group.generation)
    return float((group.sizes <= widths).mean()), float(np.exp(np.median(widths))) - 1.0


def _judge_model(deviation: ModelDeviation, scales: ErrorScales) -> _Judged:
    low, high = scales.widen_model(deviation.parts, deviation.kind, deviation.generation)
    name = f"{deviation.source} {deviation.kind}{', host' if deviation.by_host else ''}"
    return name, deviation.generation, float(low <= deviation.measured_ms / 1e3 <= high), sqrt(high / low) - 1.0


def _print_rows(title: str, rows: Sequence[_Judged]) -> None:
    by_label: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for name, generation, inside, width in rows:
        by_label[name, generation].append((inside, width))
        by_label["ALL", generation].append((inside, width))
    print(f"{title:50}{'inside':>8}{'width':>8}")
    for (name, generation), pairs in sorted(
        by_label.items(), key=lambda item: (item[0][1], item[0][0] == "ALL", item[0])
    ):
        inside, width = np.array(pairs).T
        label = f"{name}{', before Volta' if generation else ''}"
        print(f"  {label:48}{100 * np.mean(inside):7.1f}%  +{100 * np.median(width):.0f}%  {len(pairs)}")
