"""Times, memory and requirements of models by regression, with 90% intervals, stored beside the kernel database.

The regressors learn the logarithm of a cost: USHER's stack and its constituents (OSDI'24, section 3.2). Creq and Mreq
of models come from the work of their graphs. The files hold no pickles, and regressors of other data are rejected.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.ensemble import GradientBoostingRegressor, StackingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso, LinearRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.file_access import read_input, write_atomically
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError, install_hint, refuse_unwritable
from gpuprof.estimators.conformal import interval_factor
from gpuprof.estimators.learned.training_set import (
    EXPECTED_FEATURES,
    FEATURES,
    KINDS,
    MREQ,
    ModelCase,
    OpFacts,
    TrainingSet,
    expected_ns,
    graph_facts,
    group_facts,
    kind_of,
    leave_out_architecture,
    optimized_groups,
    regressor_features,
    roofline_ns,
)
from gpuprof.estimators.memory import AllocationModel, peak_activation_bytes

Array = NDArray[Any]

_SEED = 0
#: Constituents of the stack, in the paper's order; LightGBM is an option.
STACKED = ("lasso", "kernel_ridge", "gradient_boosting", "xgboost")
OPTIONAL = ("lightgbm",)


class SampledKernelRidge(KernelRidge):  # type: ignore[misc]
    """Kernel ridge regression on at most ``rows`` of the data, evenly drawn: its cost grows with their cube."""

    def __init__(self, rows: int = 1200, alpha: float = 0.1, kernel: str = "rbf", gamma: float | None = None) -> None:
        self.rows = rows
        super().__init__(alpha=alpha, kernel=kernel, gamma=gamma)

    def fit(self, X: Array, y: Array) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit on the sample."""
        if len(X) > self.rows:
            chosen = np.random.default_rng(_SEED).permutation(len(X))[: self.rows]
            X, y = X[chosen], y[chosen]  # noqa: N806
        super().fit(X, y)
        return self


def make_constituents(names: Sequence[str] = STACKED) -> dict[str, BaseEstimator]:
    """Return fresh regressors by name.

    Their hyper-parameters had the least error on the ops of 48 networks on a CPU, held out in six groups (``python -m
    bench.estimators --db DATABASE``; docs/accuracy.md has the figures). Gradient boosting is the exception: deeper
    trees have smaller errors but take several times as long to fit, unlike XGBoost's. Raises `UnavailableError` when
    the library of a regressor is not installed.
    """
    if not names:
        raise InputError("no regressor is named", f"name some of {', '.join((*STACKED, *OPTIONAL))}")
    regressors: dict[str, BaseEstimator] = {}
    for name in names:
        if name in regressors:
            raise InputError(f"the regressor {name} is named twice", "name each once")
        if name == "lasso":
            regressors[name] = make_pipeline(StandardScaler(), Lasso(alpha=0.003, max_iter=20_000, random_state=_SEED))
        elif name == "kernel_ridge":
            regressors[name] = make_pipeline(StandardScaler(), SampledKernelRidge(alpha=0.1, gamma=0.05))
        elif name == "gradient_boosting":
            # Not the histogram variant: its threads spin, which costs seconds per fit on few rows and busy cores.
            regressors[name] = GradientBoostingRegressor(
                n_estimators=100, max_depth=4, learning_rate=0.1, subsample=0.6, min_samples_leaf=4, max_features=0.5,
                random_state=_SEED,
            )  # fmt: skip
        elif name == "xgboost":
            regressors[name] = _require_library(name).XGBRegressor(
                n_estimators=200, max_depth=7, learning_rate=0.08, subsample=0.7, colsample_bytree=0.7,
                min_child_weight=12, n_jobs=1, random_state=_SEED,
            )  # fmt: skip
        elif name == "lightgbm":
            regressors[name] = _require_library(name).LGBMRegressor(
                n_estimators=200, num_leaves=24, learning_rate=0.08, subsample=0.7, subsample_freq=1,
                colsample_bytree=0.7, min_child_samples=8, n_jobs=1, random_state=_SEED, verbose=-1,
                deterministic=True, force_row_wise=True,
            )  # fmt: skip
        else:
            raise InputError(f"unknown regressor {name!r}", f"known: {', '.join((*STACKED, *OPTIONAL))}")
    return regressors


def fit_regressors(
    features: Array, target: Array, groups: Sequence[str], names: Sequence[str] = STACKED
) -> Mapping[str, BaseEstimator]:
    """Return the constituents and their stack, fitted.

    Parameters
    ----------
    features : ndarray of shape (N, F)
    target : ndarray of shape (N,)
        A logarithm.
    groups : sequence of str, length N
        Architectures: the stack's weights come from predictions for held-out architectures.
    names : sequence of str
        Constituents.

    Returns
    -------
    mapping of str to regressor
        Includes ``"stack"``, weighted with weights of at least 0.
    """
    kinds = len(set(groups))
    if kinds < 2:
        fitted = {name: model.fit(features, target) for name, model in make_constituents(names).items()}
        return fitted | {"stack": fitted["gradient_boosting" if "gradient_boosting" in fitted else names[0]]}
    splits = list(GroupKFold(min(4, kinds)).split(features, target, groups))
    stack = StackingRegressor(
        list(make_constituents(names).items()), LinearRegression(positive=True), cv=splits, n_jobs=1
    )
    stack.fit(features, target)
    return dict(zip(names, stack.estimators_, strict=True)) | {"stack": stack}


def _require_library(name: str) -> Any:
    """Return a library of the extra for training. Raises `UnavailableError` where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise UnavailableError(f"{name.partition('.')[0]} is not installed", install_hint("learn")) from None


def graph_features(graph: ModelGraph, device: Device) -> Array:
    """Return the features of a graph at its batch on a whole device: an ndarray of shape (F,).

    They are logarithms of its work and sizes, and the parts of the kinds of ops in its least time.
    """
    facts = graph_facts(graph)
    times_ns = roofline_ns(facts, device, Share())
    parts = times_ns / max(float(times_ns.sum()), 1.0)
    outputs = np.array([math.log1p(sum(math.prod(shape) for shape in fact.outputs)) for fact in facts])
    flops, traffic = sum(fact.flops for fact in facts), sum(fact.bytes_read + fact.bytes_written for fact in facts)
    kinds = np.array([kind_of(fact) for fact in facts])
    sizes = (flops, traffic, graph.weight_bytes, peak_activation_bytes(graph), float(times_ns.sum()), len(facts))
    return np.array(
        [
            *(math.log1p(size) for size in sizes),
            math.log(graph.batch),
            math.log((flops + 1.0) / (traffic + 1.0)),
            float(parts @ outputs),
            float(outputs.max()),
            *(float(parts[kinds == kind].sum()) for kind in KINDS),
        ]
    )


def fit_requirements(
    cases: Sequence[ModelCase], device: Device, names: Sequence[str] = STACKED
) -> dict[str, Mapping[str, Any]]:
    """Return regressors and their stack by requirement and name, which learn logarithms of requirements.

    Creq is learned relative to its prediction from launches, where there is one.
    """
    fitted = {}
    for requirement in sorted({name for case in cases for name in case.requirements}):
        rows = [case for case in cases if requirement in case.requirements]
        if len(rows) > 1:
            features = np.array([graph_features(case.graph, device) for case in rows])
            target = np.log([case.requirements[requirement] / (case.launched.get(requirement) or 1.0) for case in rows])
            fitted[requirement] = fit_regressors(features, target, [case.architecture for case in rows], names)
    return fitted


def predict_requirement(
    regressor: Any, requirement: str, graph: ModelGraph, device: Device, launched: Mapping[str, float]
) -> float:
    """Return Creq in percent, at most 100, or Mreq in bytes. ``launched``: `gpuprof.estimators.creq.predict_graph`."""
    ratio = math.exp(float(regressor.predict(graph_features(graph, device)[None, :])[0]))
    value = ratio * (launched.get(requirement) or 1.0)
    return value if requirement == MREQ else min(100.0, value)


STACK = "stack"
ALLOCATION = "allocation"

#: Errors of predictions for held-out architectures, as logarithms of measured over predicted: by ``"latency"``,
#: ``"memory"`` or metric of Creq, then by architecture.
Residuals = Mapping[str, Mapping[str, Sequence[float]]]


class LearnedModel:
    """Regressors of op times and of memory of one device.

    ``times``: by name, with ``"stack"``; they predict logarithms over the expected time; empty where no op was
    measured; ``memory``: None where no memory was measured; ``residuals``: empty: no intervals; ``requirements``:
    regressors of Creq by metric and of Mreq, see `fit_requirements`.
    """

    def __init__(
        self,
        device: Device,
        times: Mapping[str, Any],
        memory: AllocationModel | None,
        residuals: Residuals = MappingProxyType({}),
        requirements: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.requirements = requirements
        self.device, self.times, self.memory = device, times, memory
        self.residuals = residuals

    def predicted_ns(self, features: Array, regressor: str = STACK) -> Array:
        """Return the times of N executed ops from their `regressor_features`."""
        log_ratio = self.times[regressor].predict(features)
        # Clipped: a bad extrapolation to an unseen op must make it neither free nor dominant.
        return np.asarray(np.exp(np.clip(log_ratio, -5.0, 8.0)) * expected_ns(features))

    def latency_ms(self, graph: ModelGraph, share: Share, regressor: str = STACK) -> float:
        """Return the sum of the ops' times: runtimes execute them one after another."""
        return float(self._times(graph, share, regressor).sum()) / 1e6

    def _times(self, graph: ModelGraph, share: Share, regressor: str) -> Array:
        """Return the time of each op; 0 for ops that ONNX Runtime's optimizer ties to another op."""
        times, execution = np.zeros(len(graph.ops)), _execution(graph)
        distinct = dict(zip(execution.kinds, execution.facts, strict=True))  # equal ops are predicted once
        if distinct:
            predicted = self.predicted_ns(regressor_features([*distinct.values()], self.device, share), regressor)
            by_kind = dict(zip(distinct, predicted, strict=True))
            times[list(execution.positions)] = [by_kind[kind] for kind in execution.kinds]
        return times

    def latency(self, graph: ModelGraph, share: Share) -> Figure:
        """Return the latency and its 90% interval."""
        return _with_interval(STACK, self.latency_ms(graph, share), self.residuals.get("latency"))

    def creq_figure(self, metric: str, graph: ModelGraph, launched: Mapping[str, float]) -> Figure | None:
        """Return a compute requirement in percent with its 90% interval; None where the metric was not measured."""
        if metric not in self.requirements:
            return None
        value = predict_requirement(self.requirements[metric][STACK], metric, graph, self.device, launched)
        figure = _with_interval(STACK, value, self.residuals.get(metric))
        return figure if figure.high is None else replace(figure, high=min(100.0, figure.high))

    def memory_figure(self, graph: ModelGraph) -> Figure | None:
        """Return the peak memory and its 90% interval; None where no memory was measured."""
        peak = None if self.memory is None else self.memory.peak_bytes(graph)
        return None if peak is None else _with_interval(ALLOCATION, peak, self.residuals.get(MREQ))


def fit(data: TrainingSet, names: Sequence[str] = STACKED) -> LearnedModel:
    """Fit the regressors, without intervals."""
    ops, times = data.ops, dict[str, Any]()
    if ops is not None:
        target = np.log(ops.times_ns / expected_ns(ops.features))
        times = dict(fit_regressors(ops.features, target, ops.groups, names))
    requirements = fit_requirements(data.cases, data.device, names)
    peaks = [(case.graph, case.memory_bytes) for case in data.cases if case.memory_bytes]
    memory = AllocationModel.fit(*zip(*peaks, strict=True)) if peaks else None
    return LearnedModel(data.device, times, memory, requirements=requirements)


def fit_with_intervals(
    data: TrainingSet,
    names: Sequence[str] = STACKED,
    fitted_so_far: Callable[[int, int], None] = lambda count, total: None,
) -> LearnedModel:
    """Fit the regressors on all data, and intervals on each architecture held out.

    More than six architectures are held out in six groups. ``fitted_so_far`` receives the numbers of finished and of
    all fits.
    """
    architectures = data.architectures
    residuals: dict[str, dict[str, list[float]]] = {}
    folds = [architectures[i::6] for i in range(min(6, len(architectures)))]
    folds = folds if len(architectures) > 1 else []
    fitted_so_far(0, len(folds) + 1)
    model = fit(data, names)
    for count, fold in enumerate(folds, start=1):
        fitted_so_far(count, len(folds) + 1)
        rest = data
        for architecture in fold:
            rest = leave_out_architecture(rest, architecture)
        if not rest.cases or (rest.ops is None) != (data.ops is None):
            continue
        fitted = fit(rest, names)
        for architecture in fold:
            cases = [case for case in data.cases if case.architecture == architecture]
            for quantity, errors in _list_residuals(fitted, cases).items():
                residuals.setdefault(quantity, {})[architecture] = errors
    model.residuals = residuals
    fitted_so_far(len(folds) + 1, len(folds) + 1)
    return model


def _list_residuals(model: LearnedModel, cases: Sequence[ModelCase]) -> dict[str, list[float]]:
    """Return log(measured / predicted) of ``cases`` by quantity."""
    residuals: dict[str, list[float]] = {}
    for case in cases:
        pairs = [("latency", case.latency_ms, model.latency_ms(case.graph, case.share))] if model.times else []
        if case.memory_bytes and model.memory is not None:
            pairs.append((MREQ, case.memory_bytes, model.memory.peak_bytes(case.graph)))
        for metric in model.requirements.keys() & case.requirements.keys() - {MREQ}:
            stack = model.requirements[metric][STACK]
            predicted = predict_requirement(stack, metric, case.graph, model.device, case.launched)
            pairs.append((metric, case.requirements[metric], predicted))
        for quantity, measured, predicted in pairs:
            residuals.setdefault(quantity, []).append(math.log(measured / predicted))
    return residuals


@dataclass(frozen=True, slots=True)
class _Execution:
    """Executed ops, their facts, and keys that identify equal ops."""

    positions: tuple[int, ...]
    facts: tuple[OpFacts, ...]
    kinds: tuple[Hashable, ...]


_EXECUTIONS: dict[tuple[str, int, str], _Execution] = {}


def _execution(graph: ModelGraph) -> _Execution:
    """Return the executed ops of a graph; cached, because finding and hashing them takes longer than predicting."""
    key = (graph.sha256, graph.batch, graph.path)
    execution = _EXECUTIONS.get(key)
    if execution is None:
        if len(_EXECUTIONS) >= 512:
            _EXECUTIONS.clear()
        groups = optimized_groups(graph)
        positions = tuple(range(len(graph.ops))) if groups is None else tuple(groups)
        facts = graph_facts(graph) if groups is None else group_facts(graph, groups)
        kinds = tuple(
            (graph.ops[place].signature, fact.fused, fact.fused_functions, fact.fused_inputs, fact.working_set)
            for place, fact in zip(positions, facts, strict=True)
        )
        execution = _EXECUTIONS[key] = _Execution(positions, tuple(facts), kinds)
    return execution


def _with_interval(source: str, value: float, residuals: Mapping[str, Sequence[float]] | None) -> Figure:
    factor = interval_factor(residuals) if residuals else None
    return Figure(value, source) if factor is None else Figure(value, source, value / factor, value * factor)


SCHEMA = "gpuprof.learned/7"
_FOLDER = ".trained"  # hidden, so that the database does not read it as a run
_MANIFEST, _REGRESSORS = "manifest.json", "regressors.skops"
#: Types that a file may construct besides scikit-learn's own classes and arrays.
_TRUSTED = frozenset(
    {
        "gpuprof.estimators.learned.learned.SampledKernelRidge",
        "xgboost.core.Booster",
        "xgboost.sklearn.XGBRegressor",
        "lightgbm.basic.Booster",
        "lightgbm.sklearn.LGBMRegressor",
        "sklearn.tree._tree.Tree",
        "sklearn.utils._bunch.Bunch",
        "collections.OrderedDict",
        "collections.defaultdict",
    }
)


def folder_of(database: Path, device: str) -> Path:
    """Return the folder of a device's regressors."""
    return database / _FOLDER / device


def save_model(model: LearnedModel, database: Path, data_hash: str, architectures: tuple[str, ...]) -> Path:
    """Write the regressors used by estimates, then the manifest that validates them; return their folder.

    Raises `UnavailableError` when skops is not installed; `InputError` when the database cannot be written to.
    """
    stacks = {name: regressors[STACK] for name, regressors in model.requirements.items()}
    content = _require_library("skops.io").dumps({"times": model.times.get(STACK), "requirements": stacks})
    manifest = {
        "schema": SCHEMA,
        "device": model.device.name,
        "features": [*FEATURES, *EXPECTED_FEATURES],
        "data_hash": data_hash,
        "architectures": list(architectures),
        "regressors_sha256": hashlib.sha256(content).hexdigest(),
        "rates": _rates(model.device),
        "allocation": None if model.memory is None else list(model.memory.coefficients),
        "residuals": model.residuals,
    }
    folder = folder_of(database, model.device.name)
    with refuse_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _REGRESSORS, content)
        write_atomically(folder / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return folder


def load_model(database: Path, device: Device, data_hash: str | None = None) -> LearnedModel:
    """Return the stored regressors of ``device``.

    Raises `InputError` when there are none, or their schema, features, device's rates, data or file differ from the
    expected. ``data_hash``: expected hash of the training data.
    """
    folder = folder_of(database, device.name)
    manifest = _manifest(folder / _MANIFEST)
    expected = {
        "schema": SCHEMA,
        "device": device.name,
        "features": [*FEATURES, *EXPECTED_FEATURES],
        "rates": _rates(device),
        **({} if data_hash is None else {"data_hash": data_hash}),
    }
    if differing := [name for name, value in expected.items() if manifest.get(name) != value]:
        raise InputError(
            f"what was trained for {device.name} no longer fits: {', '.join(differing)} changed", "gpuprof train again"
        )
    content = read_input(folder / _REGRESSORS, "gpuprof train")
    if hashlib.sha256(content).hexdigest() != manifest.get("regressors_sha256"):
        raise InputError(f"{folder / _REGRESSORS} is not what was trained", "gpuprof train again")
    fitted = _regressors(content, folder)
    coefficients = manifest["allocation"]
    memory = None if coefficients is None else AllocationModel(tuple(map(float, coefficients)))
    times = {} if fitted["times"] is None else {STACK: fitted["times"]}
    requirements = {name: {STACK: stack} for name, stack in fitted["requirements"].items()}
    return LearnedModel(device, times, memory, manifest["residuals"], requirements)


def _regressors(content: bytes, folder: Path) -> dict[str, Any]:
    skops = _require_library("skops.io")
    try:
        unknown = sorted(set(skops.get_untrusted_types(data=content)) - _TRUSTED)
        if unknown:
            raise InputError(f"{folder / _REGRESSORS} would make {unknown[0]}, which no regressor of gpuprof has")
        loaded: dict[str, Any] = skops.loads(content, trusted=sorted(_TRUSTED))
    except InputError:
        raise
    except Exception as error:  # reading a damaged file raises errors of any of its libraries
        raise InputError(f"{folder / _REGRESSORS} cannot be read: {error}", "gpuprof train again") from error
    return loaded


def _manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_input(path, "gpuprof train"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", "gpuprof train again") from None
    if not isinstance(content, dict) or not {"allocation", "residuals"} <= set(content):
        raise InputError(f"{path} is no manifest of regressors", "gpuprof train again")
    return content


def _rates(device: Device) -> dict[str, Any]:
    return {
        "flops_per_s": device.flops_per_s["float32"],
        "dram_bytes_per_s": device.dram_bytes_per_s,
        "l2_bytes": float(device.l2_bytes),
        "reread_bytes_per_s": [list(pair) for pair in device.reread_bytes_per_s],
    }
