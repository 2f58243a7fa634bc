"""Roofline model: a model's time from its operations and bytes and a device's peak rates (Williams et al., 2009).

The work of the ops is a function of the batch size, so that graphs are read at few batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import ROOFLINE, UNCALIBRATED
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.estimators.constants import constant
from gpuprof.estimators.memory import peak_activation_bytes

Array = NDArray[Any]

#: Op types that run on matrix units where a device has them.
MATRIX_OPS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "FusedConv", "FusedMatMul", "FusedGemm", "Attention"}
)

_PER_ITEM = ("flops", "bytes_moved")


@dataclass(frozen=True, slots=True)
class GraphWork:
    """FLOPs and bytes of every op at a batch size."""

    op_types: tuple[str, ...]
    dtypes: tuple[str, ...]  #: Type of each op's arithmetic, by its first floating-point tensor.
    #: ``flops``, ``bytes_moved``: Shape (N,). Operations (0 where unknown), bytes read and written.
    flops: Array
    bytes_moved: Array
    unknown_ops: tuple[str, ...]  #: Op types without a formula.
    activation_bytes: float  #: Largest number of live activation bytes.
    weight_bytes: int


class WorkByBatch:
    """Work of a model at any batch size, from its graph at two sizes.

    Every quantity of an op is a fixed part (weights) plus a part in proportion to the batch; where the graph at a third
    size contradicts this (ops that mix the items of a batch), the graph is read at each requested size. ``graph_at``:
    batch size → `ModelGraph`; ``only``: the model's fixed batch.
    """

    def __init__(self, graph_at: Callable[[int], ModelGraph], only: int | None = None) -> None:
        self._graph_at = graph_at
        self.smallest_batch = only or 1  #: 1, or the model's fixed batch.
        self.smallest = work_of(graph_at(self.smallest_batch))
        self._two: GraphWork | None = None
        self._linear = True
        self._by_batch: dict[int, GraphWork] = {}  # a placement asks for each batch under dozens of shares

    @property
    def graph(self) -> ModelGraph:
        """Graph at the smallest accepted batch: 1, or the model's fixed batch."""
        return self._graph_at(self.smallest_batch)

    def at(self, batch: int) -> GraphWork:
        """Return the work at ``batch``. Raises `InputError` when the model's batch is fixed at another size."""
        if batch == self.smallest_batch:
            return self.smallest
        if batch not in self._by_batch:
            self._by_batch[batch] = self._at(batch)
        return self._by_batch[batch]

    def _at(self, batch: int) -> GraphWork:
        if self._two is None:
            self._graph_at(batch)  # in case of an error, the message names the requested batch
            self._two = work_of(self._graph_at(2))
            four = work_of(self._graph_at(4))
            self._linear = len(four.flops) == len(self._two.flops) == len(self.smallest.flops) and all(
                np.allclose(getattr(four, name), getattr(self.smallest, name) + 3 * self._slope(name), rtol=1e-6)
                for name in _PER_ITEM
            )
        if not self._linear:
            return work_of(self._graph_at(batch))
        return replace(
            self.smallest,
            **{name: getattr(self.smallest, name) + (batch - 1) * self._slope(name) for name in _PER_ITEM},
            activation_bytes=self.smallest.activation_bytes + (batch - 1) * float(self._slope("activation_bytes")),
        )

    def _slope(self, name: str) -> Array:
        return np.asarray(getattr(self._two, name) - getattr(self.smallest, name))


def work_of(graph: ModelGraph) -> GraphWork:
    """Return the work of every op of ``graph``."""
    return GraphWork(
        tuple(op.op_type for op in graph.ops),
        tuple(_dtype(op.outputs or op.inputs) for op in graph.ops),
        np.array([float(op.flops or 0) for op in graph.ops]),
        np.array([float(op.bytes_read + op.bytes_written) for op in graph.ops]),
        graph.uncounted_ops,
        float(peak_activation_bytes(graph)),
        graph.weight_bytes,
    )


def _dtype(tensors: Any) -> str:
    for tensor in tensors:
        if "float" in tensor.dtype:
            return str(tensor.dtype)
    return str(tensors[0].dtype) if tensors else "float32"


#: Key of `Device.sources` for rates measured on the device.
CEILINGS = "ceilings"


def roofline_ms(work: GraphWork, device: Device, share: Share) -> float:
    """Return the least time in milliseconds of an execution on ``share`` of ``device``."""
    return float(op_times_s(work, device, share).sum() * 1e3)


def op_times_s(work: GraphWork, device: Device, share: Share) -> Array:
    """Return a lower bound of each op's time in seconds: the longer of arithmetic and traffic, plus its launches.

    Returns
    -------
    ndarray of shape (N,)
    """
    fraction = device.granted_fraction(share)
    matrix = np.array([op in MATRIX_OPS for op in work.op_types])
    peak = np.array([_peak(device, dtype, is_matrix) for dtype, is_matrix in zip(work.dtypes, matrix, strict=True)])
    busy = loaded = np.ones(len(peak))
    if device.kind == "gpu":  # an op too small for all SMs leaves some of them idle
        units = max(1.0, device.compute_units * fraction)
        busy = np.clip(np.ceil(work.flops / constant("roofline", "tile_flops")) / units, 1.0 / units, 1.0)
        fetches = np.ceil(work.bytes_moved / constant("roofline", "fetch_bytes"))
        loaded = np.clip(constant("roofline", "bandwidth_reach") * fetches / units, 1.0 / units, 1.0)
    arithmetic = work.flops / (peak * fraction * busy)
    traffic = work.bytes_moved / (bandwidth(device, share) * loaded)
    launched = (work.flops > 0) | (work.bytes_moved > 0)
    launch_us = device.launch_overhead_us or (constant("roofline", "launch_us") if device.kind == "gpu" else 0.0)
    return np.asarray(np.maximum(arithmetic, traffic) + launched * launch_us * 1e-6)


def dispatch_ms(work: GraphWork, device: Device) -> float:
    """Return a CPU's time for dispatching ops in milliseconds, which `roofline_ms` excludes."""
    return 0.0 if device.kind == "gpu" else len(work.op_types) * constant("roofline", "dispatch_us") * 1e-3


def unknown_ms(work: GraphWork, device: Device, share: Share) -> float:
    """Return the possible extra milliseconds of ops without a formula beyond `roofline_ms`."""
    if not work.unknown_ops:
        return 0.0
    unknown = np.array([op in work.unknown_ops for op in work.op_types], dtype=bool)
    if not unknown.any():
        return 0.0
    times = op_times_s(work, device, share)
    dearest = float(times[~unknown].max(initial=0.0))
    return float(np.maximum(constant("roofline", "dearest") * times[unknown], dearest).sum() * 1e3)


def bandwidth(device: Device, share: Share) -> float:
    """Return the bytes per second available to ``share``: a MIG instance's slices, or what its units can request."""
    reach = constant("roofline", "bandwidth_reach")
    if share.mig is not None and device.mig_slices:
        slices = device.mig_profile(share.mig).memory_slices / device.mig_slices
        return device.dram_bytes_per_s * min(slices, 1.0) * min(1.0, reach * share.sm_pct / 100.0)
    return device.dram_bytes_per_s * min(1.0, reach * device.granted_fraction(share))


def reread_bandwidth(device: Device, share: Share, touched: Array) -> Array:
    """Return the bytes per second at which ``share`` rereads data at a reuse distance of ``touched`` bytes.

    Caches belong to cores, so that a share has a proportional part of their bandwidth; beyond the caches, or if they
    were not measured, `bandwidth` applies.

    Parameters
    ----------
    touched : ndarray of shape (N,)
        Bytes, infinite where unknown.

    Returns
    -------
    ndarray of shape (N,)
    """
    beyond = bandwidth(device, share)
    if not device.reread_bytes_per_s:
        return np.full(len(touched), beyond)
    sizes, rates = np.array(device.reread_bytes_per_s).T
    parts = np.where(sizes <= device.l2_bytes, device.granted_fraction(share), beyond / device.dram_bytes_per_s)
    return np.asarray(np.exp(np.interp(np.log(np.maximum(touched, 1.0)), np.log(sizes), np.log(rates * parts))))


def source_of(device: Device) -> str:
    """Return the source of a roofline figure on ``device``: uncalibrated unless its rates were measured."""
    return ROOFLINE if CEILINGS in device.sources else UNCALIBRATED


def _peak(device: Device, dtype: str, matrix: bool) -> float:
    rates = device.flops_per_s
    # ONNX Runtime's CUDA provider multiplies float32 matrices in TF32 unless told otherwise.
    if matrix and dtype == "float32" and "tfloat32" in rates:
        return rates["tfloat32"]
    return rates.get(dtype) or rates["float32"]
