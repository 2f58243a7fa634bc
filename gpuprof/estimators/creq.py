"""Creq of models without measurements on a GPU, from predicted kernel launches, and its errors on profiled models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.cross_gpu import (
    CrossGpuLatencies,
    CrossGpuModel,
    UnmeasuredModel,
    read_trained_files,
    shipped_model,
)
from gpuprof.estimators.cross_gpu.features import (
    Array,
    DeviceRates,
    Forest,
    Forests,
    OpTable,
    bound_times,
    features_of,
    rates_of,
    regressor_names,
)
from gpuprof.estimators.cross_gpu.kernels import (
    Execution,
    KernelList,
    LaunchMode,
    batch_seconds,
    host_seconds,
    list_kernels,
    type_of_weights,
)
from gpuprof.estimators.measured.measured import CREQ_METRICS

SOURCE = "creq from launches"
#: Library kernels are tiled for a fixed number of warps; other kernels fill the SM, and the target is the filled part.
FIXED_WARPS = ("matmul_cores", "conv_cores")
#: No launch on tensor cores was published: their kernels are taken to be cut as those on CUDA cores.
_INSTEAD = {"matmul_tensor": "matmul_cores", "attention": "matmul_cores"}


@dataclass(frozen=True, slots=True)
class PredictedLaunches:
    """Predicted launches of N kernels."""

    #: Shape (N,). Achieved occupancy as in ncu: warps of the busy SMs in percent of their maximum.
    occupancy_pct: Array
    #: Shape (N,). SMs needed by all blocks in percent of the GPU's, at most 100 (thesis §5.3.2).
    sm_utilization_pct: Array


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """Regressors of launch properties, by ``kind target``, as ``"conv_cores waves"``.

    Targets: warps held by a busy SM, and log2 of the blocks over those resident on the GPU at once.
    """

    forests: Mapping[str, Forest]

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> LaunchModel:
        """Return the model of the ONNX files ``kind_target.onnx``."""
        return cls(Forests({name.removesuffix(".onnx").replace("_w", " w"): file for name, file in files.items()}))

    def predict(self, ops: OpTable, device: Device, rates: DeviceRates) -> PredictedLaunches:
        """Return the occupancy and SM utilisation of ``ops`` on ``device``.

        ``device``: a GPU; ``rates``: of the device, or of the kernels' share of it.
        """
        most = _count_warps(device)
        warps, waves = np.zeros(len(ops)), np.zeros(len(ops))
        kinds = kinds_of(ops, rates)
        for kind in sorted(set(kinds.tolist())):
            rows = np.flatnonzero(kinds == kind)
            features = features_of(kind, ops.take(rows), rates, bound_times(ops.take(rows), rates))
            predicted = self.forests[f"{kind} warps"].predict(features)
            warps[rows] = predicted if kind in FIXED_WARPS else predicted * most
            waves[rows] = 2.0 ** self.forests[f"{kind} waves"].predict(features)
        return PredictedLaunches(achieved_occupancy_pct(warps, waves, device), 100.0 * np.minimum(1.0, waves))


def _count_warps(device: Device) -> int:
    """Return the maximum warps of an SM; 64, as of most GPUs, where the device does not state them."""
    return device.sm.warps if device.sm is not None else 64


def achieved_occupancy_pct(warps: Array, waves: Array, device: Device) -> Array:
    """Return ncu's achieved occupancy of kernels with ``warps`` on each busy SM, in ``waves`` over the whole GPU."""
    most = _count_warps(device)
    tail = np.where(waves > 1.0, waves / (waves + constant("occupancy", "tail_waves")), 1.0)
    return np.asarray(100.0 * np.minimum(warps, most) / most * constant("occupancy", "turnover") * tail)


def kinds_of(ops: OpTable, rates: DeviceRates) -> NDArray[np.str_]:
    """Return the kind of each op: the name of its regressor, else of the most similar."""
    names = regressor_names(ops, rates)
    usual = ops.is_in("conv") & (ops.kernel == 3) & (ops.stride == 1)
    kinds = np.array([_INSTEAD.get(str(name), str(name)) for name in names], dtype=np.str_)
    return np.where(usual, "conv_cores", kinds)


def predict_creq_pct(
    kernels: KernelList,
    model: CrossGpuModel,
    launches: LaunchModel,
    device: Device,
    precision: str,
    runtime: LaunchMode,
    host: float = 1.0,
) -> dict[str, float]:
    """Return each metric of Creq in percent of the whole of ``device``.

    The maximum occupancy is that of a kernel (USHER's Creq of models with sequential kernels); averages are over the
    time of the batch, gaps and copies included as in measurements. Raises `InputError` when the device lacks the
    precision. ``host``: how many times slower than usual the host launches, as under a profiler.
    """
    rates = rates_of(device, precision)
    busy_s = np.array(kernels.count, dtype=float) * model.kernel_times(kernels.ops, rates)
    fill = launches.predict(kernels.ops, device, rates)
    span_s = batch_seconds(float(busy_s.sum()), host * host_seconds(kernels, runtime), kernels, runtime)
    averages = [float(busy_s @ pct) / max(span_s, 1e-12) for pct in (fill.occupancy_pct, fill.sm_utilization_pct)]
    return dict(zip(CREQ_METRICS, (float(fill.occupancy_pct.max(initial=0.0)), *averages), strict=True))


@cache
def shipped_creq() -> tuple[LaunchModel, Mapping[str, tuple[float, float]]]:
    """Return the shipped model, and by metric the points added to a prediction for the ends of its interval.

    The intervals held nine of ten of the thesis's figures, each model predicted without its own figures. Every file is
    checked against its hash in the provenance. Raises `InputError` when a file is missing or differs from the trained
    file.
    """
    metadata, files = read_trained_files(datasets() / "creq")
    return LaunchModel.of_files(files), {metric: (low, high) for metric, (low, high) in metadata["interval"].items()}


def predict_graph(graph: ModelGraph, device: Device) -> dict[str, float]:
    """Return each metric of Creq in percent of a whole GPU by ONNX Runtime; empty on CPUs and for unknown SMs."""
    if device.kind != "gpu" or device.sm is None:
        return {}
    precision, runtime = Execution().rate_name(device, type_of_weights(graph)), LaunchMode.ONNXRUNTIME
    kernels = list_kernels(graph, precision, runtime)
    return predict_creq_pct(kernels, shipped_model(), shipped_creq()[0], device, precision, runtime)


class UnprofiledRequirements:
    """Predicts Creq of models on GPUs from their kernels, cached by batch. ``latencies``: the source of the kernels."""

    def __init__(self, latencies: CrossGpuLatencies) -> None:
        self._latencies = latencies
        self._known: dict[tuple[str, str, int], tuple[tuple[str, Figure], ...]] = {}

    def predict(self, target: UnmeasuredModel, device: Device, batch: int) -> tuple[tuple[str, Figure], ...]:
        """Return the requirement of ``batch`` by each metric, in percent of the whole of ``device``.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        key = (target.name, device.name, batch)
        if key not in self._known:
            by_batch, (launches, interval) = self._latencies.kernels_of(target, device), shipped_creq()
            kernels, precision, runtime = by_batch.at(batch), by_batch.precision, by_batch.runtime
            figures = []
            if len(kernels.ops) and device.sm is not None:
                source = f"{SOURCE}: {precision}, {runtime}"
                values = predict_creq_pct(kernels, shipped_model(), launches, device, precision, runtime)
                for metric, value in values.items():
                    low, high = (value + points for points in interval[metric])
                    figures.append((metric, Figure(value, source, max(0.0, low), min(100.0, max(value, high)))))
            self._known[key] = tuple(figures)
        return self._known[key]
