"""Fits the intervals of GPUs that nobody measured, and judges them on GPUs and architectures left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt

import numpy as np
from numpy.typing import NDArray

from bench.op_training import chip_of
from bench.unseen_models import ModelDeviation
from gpuprof.domain.catalogue import device
from gpuprof.estimators.conformal import LEVEL, quantile
from gpuprof.estimators.cross_gpu.cross_gpu import ANY_MODEL, ErrorScales, generation_of

Array = NDArray[np.float64]
_SAMPLE = 400
#: Fewer architectures of a kind, or models of a table, have no conformal quantile of this level.
_ENOUGH = round(LEVEL / (1.0 - LEVEL))
_GENERATIONS = ("", " old")
#: Least part of a table inside the intervals.
_LEAST = 0.8


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
        units: dict[Hashable, list[float]] = {
            (group.chip, group.name): (group.sizes / _scale_ops(without[group.chip], group.kinds)).tolist()
            for group in groups
            if group.generation == generation
        }
        op_factors[generation] = _conformal(units, op_factors.get("", 1.0))
    host = _fit_host(models)
    return ErrorScales(scales, op_factors, _fit_models(models, without, scales, host), host)


def _fit_host(models: Iterable[ModelDeviation]) -> float:
    """Return the difference that nine of ten hosts keep within from the mean of a runtime's other hosts.

    A host is a source's on a board; its time is the median over the models that take it longer than their kernels.
    Without two hosts of a runtime, a factor of two is assumed.
    """
    limited: dict[str, list[ModelDeviation]] = defaultdict(list)
    for model in models:
        if model.by_host:
            limited[model.runtime.split()[0].partition(":")[0]].append(model)
    differences = []
    for of_runtime in limited.values():
        hosts = _group(of_runtime, _name_host, lambda model: log(model.measured_ms / 1e3 / model.parts.host_s))
        times = [float(np.median(errors)) for errors in hosts.values()]
        others = len(times) - 1
        differences += [abs(time - (sum(times) - time) / others) for time in times if others]
    return round(quantile(differences or [log(2.0)], LEVEL) or 0.0, 4)


def _fit_models(
    models: Sequence[ModelDeviation],
    without: Mapping[str, Mapping[str, float]],
    scales: Mapping[str, float],
    host: float,
) -> dict[str, float]:
    def size(deviation: ModelDeviation) -> float:
        """Return the number of scales that the ends of `ErrorScales.widen_model` need to hold the measured time."""
        scale = _plain(without.get(chip_of(deviation.device), scales)).mean_scale(deviation.parts.by_kind)
        measured_s, kernels_s, host_s = deviation.measured_ms / 1e3, deviation.parts.kernels_s, deviation.parts.host_s
        if measured_s <= kernels_s:
            return log(kernels_s / measured_s) / scale
        if measured_s <= hypot(kernels_s, host_s * exp(host)):
            return 0.0
        return log(sqrt(measured_s**2 - host_s**2) / kernels_s) / scale

    factors: dict[str, float] = {}
    for generation in _GENERATIONS:
        generation_models = [model for model in models if not model.by_host and model.generation == generation]
        everything = _group(generation_models, _name_architecture, size)
        factors[ANY_MODEL + generation] = _conformal(everything, factors.get(ANY_MODEL, 1.0))
        for kind in sorted({model.kind for model in generation_models}):
            of_kind = [model for model in generation_models if model.kind == kind]
            units, tables = (_group(of_kind, name, size) for name in (_name_architecture, _name_table))
            tables = {name: sizes for name, sizes in tables.items() if len(sizes) >= _ENOUGH}
            if len(units) >= _ENOUGH or tables:
                of_units = _conformal(units, 0.0) if len(units) >= _ENOUGH else 0.0
                factors[kind + generation] = max(of_units, _conformal(tables, 0.0), _hold_tables(tables))
    return factors


def _name_architecture(model: ModelDeviation) -> Hashable:
    return _name_chip(model), _name_network(model)


def _name_chip(model: ModelDeviation) -> Hashable:
    return chip_of(model.device)


def _name_network(model: ModelDeviation) -> Hashable:
    return model.model.split()[0]


def _name_host(model: ModelDeviation) -> Hashable:
    return model.source, model.device


def _name_table(model: ModelDeviation) -> Hashable:
    """Return the source, board, runtime and precision: the errors of a table are alike."""
    return model.source, model.device, model.runtime


def _group(
    models: Iterable[ModelDeviation],
    name: Callable[[ModelDeviation], Hashable],
    size: Callable[[ModelDeviation], float],
) -> dict[Hashable, list[float]]:
    units: dict[Hashable, list[float]] = defaultdict(list)
    for model in models:
        units[name(model)].append(size(model))
    return units


def _hold_tables(tables: Mapping[Hashable, Sequence[float]]) -> float:
    """Return what holds `_LEAST` of the models of nine of ten tables."""
    each = [_quantile([(np.array(sizes), np.ones(len(sizes)))], _LEAST) for sizes in tables.values()]
    return _quantile([(np.array(each), np.ones(len(each)))]) if each else 0.0


def _plain(scales: Mapping[str, float]) -> ErrorScales:
    return ErrorScales(scales, {}, {}, 0.0)


def _conformal(units: Mapping[Hashable, Sequence[float]], otherwise: float) -> float:
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
    """Print coverage and median width of the 90% intervals of GPUs, of tables and of architectures that were not seen.

    A host is judged by the others.
    """
    print(f"\n{LEVEL:.0%} intervals: coverage and median half width, fitted without the GPU's own errors\n")
    fitted: dict[Hashable, ErrorScales] = {
        chip: fit_scales([group for group in groups if group.chip != chip], _leave_out(models, _name_chip, chip))
        for chip in {group.chip for group in groups} | {chip_of(model.device) for model in models}
    }
    rows = [(group.name, group.generation, *_judge_ops(group, fitted[group.chip])) for group in groups]
    _print_rows("ops", rows)
    other_hosts = {host: _fit_host(_leave_out(models, _name_host, host)) for host in set(map(_name_host, models))}

    def print_models(
        title: str, name: Callable[[ModelDeviation], Hashable], scales: Mapping[Hashable, ErrorScales]
    ) -> None:
        judged = [
            (model, _judge_model(model, replace(scales[name(model)], host=other_hosts[_name_host(model)])))
            for model in models
        ]
        _print_rows(title, [row for _, row in judged])
        _print_rows(f"{title}, at batch 1", [row for model, row in judged if model.batch == 1])
        _print_rows(f"{title}, limited by the host", [row for model, row in judged if model.by_host])

    print_models("models", _name_chip, fitted)
    for title, name in (("the table", _name_table), ("the architecture", _name_network)):
        without = {
            left_out: fit_scales(groups, _leave_out(models, name, left_out)) for left_out in set(map(name, models))
        }
        print_models(f"models, {title} left out on all GPUs", name, without)


def _leave_out(
    models: Iterable[ModelDeviation], name: Callable[[ModelDeviation], Hashable], left_out: Hashable
) -> list[ModelDeviation]:
    return [model for model in models if name(model) != left_out]


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
    name = f"{deviation.source} {deviation.kind}"
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
