"""Regressors of the logarithm of a cost: USHER's stack and its constituents (OSDI'24, section 3.2).

Creq and Mreq of models come from the work of their graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError, install_hint
from gpuprof.estimators.learned.features import KINDS, facts_of_op, kind_of, roofline_ns
from gpuprof.estimators.memory import peak_activation_bytes

Array = NDArray[Any]

_SEED = 0
_FOLDS = 4
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
            regressors[name] = _xgboost()
        elif name == "lightgbm":
            regressors[name] = _lightgbm()
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
    splits = list(GroupKFold(min(_FOLDS, kinds)).split(features, target, groups))
    stack = StackingRegressor(
        list(make_constituents(names).items()), LinearRegression(positive=True), cv=splits, n_jobs=1
    )
    stack.fit(features, target)
    return dict(zip(names, stack.estimators_, strict=True)) | {"stack": stack}


def _xgboost() -> BaseEstimator:
    try:
        from xgboost import XGBRegressor
    except ImportError:
        raise UnavailableError("xgboost is not installed", install_hint("learn")) from None
    return XGBRegressor(
        n_estimators=200, max_depth=7, learning_rate=0.08, subsample=0.7, colsample_bytree=0.7, min_child_weight=12,
        n_jobs=1, random_state=_SEED,
    )  # fmt: skip


def _lightgbm() -> BaseEstimator:
    try:
        from lightgbm import LGBMRegressor
    except ImportError:
        raise UnavailableError("lightgbm is not installed", install_hint("learn")) from None
    return LGBMRegressor(
        n_estimators=200, num_leaves=24, learning_rate=0.08, subsample=0.7, subsample_freq=1, colsample_bytree=0.7,
        min_child_samples=8, n_jobs=1, random_state=_SEED, verbose=-1, deterministic=True, force_row_wise=True,
    )  # fmt: skip


#: Name of Mreq among the requirements; the others are metrics of Creq.
MREQ = "memory"


def graph_features(graph: ModelGraph, device: Device) -> Array:
    """Return the features of a graph at its batch on a whole device: an ndarray of shape (F,).

    They are logarithms of its work and sizes, and the parts of the kinds of ops in its least time.
    """
    facts = [facts_of_op(op, graph.batch) for op in graph.ops]
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
    graphs: Sequence[ModelGraph],
    measured: Sequence[Mapping[str, float]],
    architectures: Sequence[str],
    device: Device,
    names: Sequence[str] = STACKED,
) -> dict[str, Mapping[str, Any]]:
    """Return the regressors of each requirement's logarithm, with their stack, by requirement and name.

    ``measured``: requirements of each graph, Creq in percent, Mreq in bytes; ``architectures``: of each graph.
    """
    features = [graph_features(graph, device) for graph in graphs]
    fitted = {}
    for requirement in sorted({name for values in measured for name in values}):
        rows = [row for row, values in enumerate(measured) if values.get(requirement, 0.0) > 0.0]
        if len(rows) > 1:
            target = np.log([measured[row][requirement] for row in rows])
            groups = [architectures[row] for row in rows]
            fitted[requirement] = fit_regressors(np.array([features[row] for row in rows]), target, groups, names)
    return fitted


def predict_requirement(regressor: Any, requirement: str, graph: ModelGraph, device: Device) -> float:
    """Return Creq in percent, at most 100, or Mreq in bytes."""
    value = math.exp(float(regressor.predict(graph_features(graph, device)[None, :])[0]))
    return value if requirement == MREQ else min(100.0, value)
