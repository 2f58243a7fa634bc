"""Predicts launches of kernels that were not profiled: two regressors beside the one of their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.features import bound_times, features_of, regressor_names
from gpuprof.estimators.cross_gpu.forest import Forest, Forests
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable
from gpuprof.estimators.cross_gpu.rates import DeviceRates

#: Kinds of kernels, each with two regressors; features as `cross_gpu.features.features_of` gives them.
KINDS = ("matmul_cores", "conv_cores", "elementwise", "norm", "softmax")
#: What is learned: the warps that an SM at work holds, and log2 of the blocks over what the GPU holds at once.
TARGETS = ("warps", "waves")
#: Kernels of libraries are cut for a number of warps; others fill what there is, and are learned as a part of it.
FIXED_WARPS = ("matmul_cores", "conv_cores")
#: No launch on tensor cores was published: their kernels are taken to be cut as those on CUDA cores.
_INSTEAD = {"matmul_tensor": "matmul_cores", "attention": "matmul_cores"}
#: Blocks come and go: over a kernel that fills an SM, so many of the warps that fit are there (alexnet's rows of the
#: thesis's Table A.1 at batch 4 to 128).
_TURNOVER = 0.945
#: The last blocks leave the GPU half empty for as long as one block runs.
_TAIL_WAVES = 0.5
#: Warps that an SM can hold, where the device does not say.
_WARPS = 64


@dataclass(frozen=True, slots=True)
class PredictedLaunches:
    """Of N kernels."""

    #: Shape (N,). Achieved occupancy, as ncu counts it: warps of the SMs at work in percent of those that they can
    #: hold.
    occupancy_pct: Array
    #: Shape (N,). SMs that all blocks need in percent of the GPU's, at most 100 (thesis §5.3.2).
    sm_utilization_pct: Array


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """Regressors by ``kind target``, as ``"conv_cores waves"``."""

    forests: Mapping[str, Forest]

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> LaunchModel:
        """Return the model whose trees are these ONNX files, by ``kind_target.onnx``."""
        return cls(Forests({name.removesuffix(".onnx").replace("_w", " w"): file for name, file in files.items()}))

    def predict(self, ops: OpTable, device: Device, rates: DeviceRates) -> PredictedLaunches:
        """Return how ``ops`` fill ``device``.

        ``device``: a GPU; ``rates``: of the device, or of the share of it that the kernels run on.
        """
        most = device.sm.warps if device.sm is not None else _WARPS
        warps, waves = np.zeros(len(ops)), np.zeros(len(ops))
        kinds = kinds_of(ops, rates)
        for kind in sorted(set(kinds.tolist())):
            rows = np.flatnonzero(kinds == kind)
            features = launch_features(kind, ops.take(rows), rates)
            found = self.forests[f"{kind} warps"].predict(features)
            warps[rows] = found if kind in FIXED_WARPS else found * most
            waves[rows] = 2.0 ** self.forests[f"{kind} waves"].predict(features)
        return PredictedLaunches(achieved_occupancy_pct(warps, waves, device), 100.0 * np.minimum(1.0, waves))


def achieved_occupancy_pct(warps: Array, waves: Array, device: Device) -> Array:
    """Return what ncu counts of kernels whose SMs at work hold ``warps``, in ``waves`` over the whole GPU."""
    most = device.sm.warps if device.sm is not None else _WARPS
    tail = np.where(waves > 1.0, waves / (waves + _TAIL_WAVES), 1.0)
    return np.asarray(100.0 * np.minimum(warps, most) / most * _TURNOVER * tail)


def kinds_of(ops: OpTable, rates: DeviceRates) -> NDArray[np.str_]:
    """Return which of `KINDS` each op is of."""
    names = regressor_names(ops, rates)
    conv = ops.family == FAMILIES.index("conv")
    usual = conv & (ops.kernel == 3) & (ops.stride == 1)
    found = np.array([_INSTEAD.get(str(name), str(name)) for name in names], dtype=np.str_)
    return np.where(usual, "conv_cores", found)


def launch_features(kind: str, ops: OpTable, rates: DeviceRates) -> Array:
    """Return what the regressors of ``kind`` see of ``ops``, shape (N, F)."""
    return features_of(kind, ops, rates, bound_times(ops, rates))
