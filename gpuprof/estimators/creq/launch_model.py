"""Predicts launches of unprofiled kernels with two regressors for each kind of kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.features import bound_times, features_of, regressor_names
from gpuprof.estimators.cross_gpu.forest import Forest, Forests
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable
from gpuprof.estimators.cross_gpu.rates import DeviceRates

#: Kinds of kernels, each with two regressors; features as `cross_gpu.features.features_of` gives them.
KINDS = ("matmul_cores", "conv_cores", "elementwise", "norm", "softmax")
#: Regression targets: warps held by a busy SM, and log2 of the blocks over those resident on the GPU at once.
TARGETS = ("warps", "waves")
#: Library kernels are tiled for a fixed number of warps; other kernels fill the SM, and the target is the filled part.
FIXED_WARPS = ("matmul_cores", "conv_cores")
#: No launch on tensor cores was published: their kernels are taken to be cut as those on CUDA cores.
_INSTEAD = {"matmul_tensor": "matmul_cores", "attention": "matmul_cores"}
#: Maximum warps of an SM, where the device does not state them.
_WARPS = 64


@dataclass(frozen=True, slots=True)
class PredictedLaunches:
    """Predicted launches of N kernels."""

    #: Shape (N,). Achieved occupancy as in ncu: warps of the busy SMs in percent of their maximum.
    occupancy_pct: Array
    #: Shape (N,). SMs needed by all blocks in percent of the GPU's, at most 100 (thesis §5.3.2).
    sm_utilization_pct: Array


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """Regressors by ``kind target``, as ``"conv_cores waves"``."""

    forests: Mapping[str, Forest]

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> LaunchModel:
        """Return the model of the ONNX files ``kind_target.onnx``."""
        return cls(Forests({name.removesuffix(".onnx").replace("_w", " w"): file for name, file in files.items()}))

    def predict(self, ops: OpTable, device: Device, rates: DeviceRates) -> PredictedLaunches:
        """Return the occupancy and SM utilisation of ``ops`` on ``device``.

        ``device``: a GPU; ``rates``: of the device, or of the kernels' share of it.
        """
        most = device.sm.warps if device.sm is not None else _WARPS
        warps, waves = np.zeros(len(ops)), np.zeros(len(ops))
        kinds = kinds_of(ops, rates)
        for kind in sorted(set(kinds.tolist())):
            rows = np.flatnonzero(kinds == kind)
            features = launch_features(kind, ops.take(rows), rates)
            predicted = self.forests[f"{kind} warps"].predict(features)
            warps[rows] = predicted if kind in FIXED_WARPS else predicted * most
            waves[rows] = 2.0 ** self.forests[f"{kind} waves"].predict(features)
        return PredictedLaunches(achieved_occupancy_pct(warps, waves, device), 100.0 * np.minimum(1.0, waves))


def achieved_occupancy_pct(warps: Array, waves: Array, device: Device) -> Array:
    """Return ncu's achieved occupancy of kernels with ``warps`` on each busy SM, in ``waves`` over the whole GPU."""
    most = device.sm.warps if device.sm is not None else _WARPS
    tail = np.where(waves > 1.0, waves / (waves + constant("occupancy", "tail_waves")), 1.0)
    return np.asarray(100.0 * np.minimum(warps, most) / most * constant("occupancy", "turnover") * tail)


def kinds_of(ops: OpTable, rates: DeviceRates) -> NDArray[np.str_]:
    """Return the kind of each op, from `KINDS`."""
    names = regressor_names(ops, rates)
    conv = ops.family == FAMILIES.index("conv")
    usual = conv & (ops.kernel == 3) & (ops.stride == 1)
    kinds = np.array([_INSTEAD.get(str(name), str(name)) for name in names], dtype=np.str_)
    return np.where(usual, "conv_cores", kinds)


def launch_features(kind: str, ops: OpTable, rates: DeviceRates) -> Array:
    """Return the features of ``ops`` for the regressors of ``kind``, shape (N, F)."""
    return features_of(kind, ops, rates, bound_times(ops, rates))
