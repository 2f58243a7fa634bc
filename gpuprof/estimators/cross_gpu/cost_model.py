"""Times of ops on a GPU: physical bounds times ratios learned on other GPUs.

The trees of the trained regressors are kept as ONNX models (TreeEnsembleRegressor) and run by ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuprof.errors import InputError, UnavailableError, install_hint
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.features import (
    FAMILIES,
    Array,
    OpBounds,
    OpTable,
    bound_times,
    features_of,
    prepare_seconds,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.rates import DeviceRates

_INPUT = "features"


class Forest:
    """A sum of trees.

    Parameters
    ----------
    content : bytes
        An ONNX model whose only node is a TreeEnsembleRegressor in double precision.
    name : str
        Name of the model in errors.
    """

    def __init__(self, content: bytes, name: str) -> None:
        try:
            import onnxruntime
        except ImportError:
            message = "estimates for GPUs without measurements need ONNX Runtime, which is not installed"
            raise UnavailableError(message, install_hint("cpu")) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # sums in one order on every machine
        options.log_severity_level = 4  # fatal errors only
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises classes of its own
            raise InputError(f"{name} is no regressor that gpuprof trained: {error}", "reinstall gpuprof") from None
        # Trees without splits on the last features declare fewer features.
        (declared,) = self._session.get_inputs()
        self._width = declared.shape[1] if isinstance(declared.shape[1], int) else None

    def predict(self, rows: Array) -> Array:
        """Return the sum of the leaves of each row.

        Parameters
        ----------
        rows : ndarray of shape (N, F)

        Returns
        -------
        ndarray of shape (N,)
        """
        if not len(rows):
            return np.zeros(0)
        inputs = np.ascontiguousarray(rows[:, : self._width], dtype=np.float64)
        return np.asarray(self._session.run(None, {_INPUT: inputs})[0], dtype=np.float64).reshape(-1)


class Forests(dict[str, Forest]):
    """Forests by name, each opened on first use: an answer needs few of the shipped forests."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        super().__init__()
        self._contents = contents

    def __missing__(self, name: str) -> Forest:
        """Open a forest. Raises `InputError` as `Forest` does."""
        self[name] = Forest(self._contents[name], name)
        return self[name]


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
    conv = ops.family == FAMILIES.index("conv")
    odd = conv & (ops.b > 1.0) & (np.log2(ops.n) % 1.0 > 0.0)
    slower = np.where(odd, constant("sm", "odd_groups"), 1.0)
    return np.asarray(seconds * slower + np.where(conv, constant("sm", "convolution_s"), 0.0))
