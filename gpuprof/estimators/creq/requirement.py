"""Creq and Mreq of a model from its kernels: their times, and how each fills the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.creq.launch_model import LaunchModel
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel
from gpuprof.estimators.cross_gpu.kernels import KernelList, LaunchMode
from gpuprof.estimators.cross_gpu.kernels_by_batch import batch_seconds, host_seconds
from gpuprof.estimators.cross_gpu.op_table import Array
from gpuprof.estimators.cross_gpu.rates import rates_of


@dataclass(frozen=True, slots=True)
class KernelFill:
    """Times and fill of the kernels of a batch."""

    busy_s: Array  #: Shape (N,). Time of each, all its runs.
    #: ``occupancy_pct``, ``sm_utilization_pct``: Shape (N,).
    occupancy_pct: Array
    sm_utilization_pct: Array
    host_s: float  #: Launch time of the host for all kernels.
    kernels: KernelList
    runtime: LaunchMode

    @property
    def total_s(self) -> float:
        """Time of the batch."""
        return self._span_s(1.0)

    def max_occupancy_pct(self) -> float:
        """Return the largest occupancy of a kernel (USHER's Creq of models with sequential kernels)."""
        return float(self.occupancy_pct.max(initial=0.0))

    def wavg_occupancy_pct(self, host: float = 1.0) -> float:
        """Return WAO; ``host``: how many times slower than usual the host launches, as under a profiler."""
        return float((self.busy_s * self.occupancy_pct).sum()) / self._span_s(host)

    def wavg_sm_util_pct(self, host: float = 1.0) -> float:
        """Return WSM; ``host`` as for `wavg_occupancy_pct`."""
        return float((self.busy_s * self.sm_utilization_pct).sum()) / self._span_s(host)

    def _span_s(self, host: float) -> float:
        """Return the time over which requirements are averaged, gaps and copies included as in measurements."""
        busy_s = float(self.busy_s.sum())
        return max(batch_seconds(busy_s, host * self.host_s, self.kernels, self.runtime), 1e-12)


def fill_of(
    kernels: KernelList,
    model: CrossGpuModel,
    launches: LaunchModel,
    device: Device,
    precision: str,
    runtime: LaunchMode,
) -> KernelFill:
    """Return how ``kernels`` fill the whole of ``device``. Raises `InputError` when the device lacks the precision."""
    rates = rates_of(device, precision, Share())
    count = np.array(kernels.count, dtype=float)
    predicted = launches.predict(kernels.ops, device, rates)
    return KernelFill(
        count * model.kernel_times(kernels.ops, rates),
        predicted.occupancy_pct,
        predicted.sm_utilization_pct,
        host_seconds(kernels, runtime),
        kernels,
        runtime,
    )
