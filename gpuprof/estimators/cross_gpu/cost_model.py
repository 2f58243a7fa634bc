"""Times of ops on a GPU: physical bounds times ratios learned on other GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.features import (
    OpBounds,
    bound_times,
    features_of,
    prepare_seconds,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.forest import Forest, Forests
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable
from gpuprof.estimators.cross_gpu.rates import DeviceRates

_CONVOLUTION = FAMILIES.index("conv")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Regressors by name."""

    forests: Mapping[str, Forest]  #: `features.REGRESSORS` → trees.
    #: Seconds of launching and timing a single op in the published measurements, by family; seconds of frameworks'
    #: preparation before attention and products in 8 bits, by `features.preparation_names`.
    floor_s: Mapping[str, float]

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], floor_s: Mapping[str, float]) -> CostModel:
        """Return the model of these ONNX files."""
        return cls(Forests(files), floor_s)

    def kernel_times(self, ops: OpTable, rates: DeviceRates, bounds: OpBounds | None = None) -> Array:
        """Return the GPU seconds of each op without its launch, at least its hard bound.

        ``bounds``: by default those of ops in a long run at the power limit.

        Returns
        -------
        ndarray of shape (N,)
        """
        bounds = bounds or bound_times(ops, rates)
        times = np.zeros(len(ops))
        names = regressor_names(ops, rates)
        for name in sorted(set(names.tolist())):
            rows = np.flatnonzero(names == name)
            of_rows = bounds.take(rows)
            group = ops.take(rows)
            ratio = np.exp(self.forests[name].predict(features_of(name, group, rates, of_rows)))
            least = of_rows.expected_s + np.maximum(rates.kernel_s, prepare_seconds(group, rates, self.floor_s))
            times[rows] = np.maximum(
                _add_convolving(group, least * ratio) if rates.tensor else least * ratio, of_rows.hard_s
            )
        return times


def _add_convolving(ops: OpTable, seconds: Array) -> Array:
    """Return ``seconds`` of products with the extra time of convolutions on tensor cores added; other ops unchanged."""
    conv = ops.family == _CONVOLUTION
    odd = conv & (ops.b > 1.0) & (np.log2(ops.n) % 1.0 > 0.0)
    slower = np.where(odd, constant("sm", "odd_groups"), 1.0)
    return np.asarray(seconds * slower + np.where(conv, constant("sm", "convolution_s"), 0.0))
