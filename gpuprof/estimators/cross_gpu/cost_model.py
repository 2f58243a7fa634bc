"""Times of ops on a GPU: bound of physics times what the regressors learned on other GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuprof.estimators.cross_gpu.features import (
    OpBounds,
    bound_times,
    features_of,
    prepare_seconds,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.forest import Forest, ForestTexts
from gpuprof.estimators.cross_gpu.op_table import Array, OpTable
from gpuprof.estimators.cross_gpu.rates import DeviceRates


@dataclass(frozen=True, slots=True)
class CostModel:
    """Regressors by name."""

    forests: Mapping[str, Forest]  #: `features.REGRESSORS` → trees.
    #: What launching and timing a single op took where the published ops were measured, by family; what frameworks do
    #: before attention and products in 8 bits, by `features.preparation_names`.
    floor_s: Mapping[str, float]

    @classmethod
    def of_texts(cls, texts: Mapping[str, str], floor_s: Mapping[str, float]) -> CostModel:
        """Return the model that LightGBM's texts describe."""
        return cls(ForestTexts(texts), floor_s)

    def kernel_times(self, ops: OpTable, rates: DeviceRates, bounds: OpBounds | None = None) -> Array:
        """Return the seconds that each op takes on the GPU, launching not counted, never less than its hard bound.

        ``bounds``: by default of ops in a long run, the power limit reached.

        Returns
        -------
        ndarray of shape (N,)
        """
        bounds = bounds or bound_times(ops, rates)
        times = np.zeros(len(ops))
        names = regressor_names(ops, rates)
        for name in sorted(set(names.tolist())):
            rows = np.flatnonzero(names == name)
            of_rows = OpBounds(bounds.expected_s[rows], bounds.hard_s[rows], bounds.intensity[rows])
            own = ops.take(rows)
            ratio = np.exp(self.forests[name].predict(features_of(name, own, rates.take(rows), of_rows)))
            least = of_rows.expected_s + np.maximum(rates.kernel_s, prepare_seconds(own, self.floor_s))
            times[rows] = np.maximum(least * ratio, of_rows.hard_s)
        return times
