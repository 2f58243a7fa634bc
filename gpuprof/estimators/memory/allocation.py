"""Peak memory as a sum of runtimes' allocations, with coefficients fitted to a device's measurements."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin

from gpuprof.estimators.memory.memory_features import MEMORY_FEATURES

Array = NDArray[Any]


class AllocationModel(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Copies of the weights, the arena for activations, inputs and outputs, and a constant per model.

    Runtimes keep weights once as read and once in the layout of their kernels, those of convolutions in blocks; arenas
    exceed the live tensors. The non-negative factors of these parts are fitted to relative errors. Unlike trees, the
    model extrapolates beyond the sizes of its training data. Fits and predicts logarithms over the least memory, as the
    other regressors do.
    """

    def fit(self, X: Array, y: Array) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit to features of `memory_features`, shape (N, F), and log(peak / least), shape (N,)."""
        peak = np.exp(y) * np.expm1(X[:, 0])
        self.coefficients_, _ = nnls(_parts(X) / peak[:, None], np.ones(len(peak)))
        return self

    def predict(self, X: Array) -> Array:  # noqa: N803 - scikit-learn's name
        """Return log(peak / least), shape (N,)."""
        return np.asarray(np.log(np.maximum(_parts(X) @ self.coefficients_, 1.0) / np.expm1(X[:, 0])))


def _parts(features: Array) -> Array:
    """Return bytes of weights by their kind, of the arena, of inputs and outputs, the number of ops, and 1."""
    column = {name: np.expm1(features[:, i]) for i, name in enumerate(MEMORY_FEATURES) if name.startswith("log_")}
    products, convolutions = column["log_matrix_weights"], column["log_convolution_weights"]
    return np.column_stack(
        [
            products,
            convolutions,
            np.maximum(column["log_weights"] - products - convolutions, 0.0),
            column["log_arena_peak"],
            column["log_arena_reserved"],
            column["log_inputs_outputs"],
            1e5 * column["log_ops"],  # scaled so that all coefficients are of similar size
            np.full(len(features), 1e7),
        ]
    )
