"""The kernels of a model at every batch, and the host's time to launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import hypot

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError
from gpuprof.estimators.constants import constant, find_constant
from gpuprof.estimators.cross_gpu.kernels import LAYOUT_OF_CONVOLUTION, KernelList, LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.op_table import OpTable

#: Largest batch up to which every batch is predicted. Among larger batches, at most two per doubling are predicted; the
#: others are interpolated linearly.
_DENSE = 4
#: Batches whose graphs decide whether kernels are linear in the batch.
_READ = tuple(1 << power for power in range(3))
_DOUBLINGS = tuple(1 << power for power in range(2, 20))
_LINEAR_COLUMNS = tuple(field.name for field in fields(OpTable) if field.name != "family")


class KernelsByBatch:
    """The kernels of a model at any batch, from its graphs at two batches where all kernels are linear in the batch."""

    def __init__(
        self,
        graph_at: Callable[[int], ModelGraph],
        precision: str,
        runtime: LaunchMode,
        host_us: float | None = None,
    ) -> None:
        self._graph_at = graph_at
        self.precision = precision  #: Type of the products' arithmetic.
        self.runtime = runtime  #: How nodes become kernels.
        self.host_us = host_us  #: Time of a launch on the host; None: the runtime's usual time.
        self._known: dict[int, KernelList] = {}
        self._linear: bool | None = None
        self._distinct: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._host_s: dict[int, float] = {}

    def list_grid(self, most: int) -> tuple[int, ...]:
        """Return the predicted batches up to ``most``."""
        points = {*range(1, _DENSE + 1), *(step for low in _DOUBLINGS for step in self._list_steps(low))}
        return tuple(point for point in sorted(points) if point <= most and (self.is_linear() or self._is_taken(point)))

    def _is_taken(self, batch: int) -> bool:
        """Return whether the model accepts a batch: a fixed batch excludes all others."""
        try:
            self.at(batch)
        except InputError:
            return False
        return True

    def find_distinct(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the distinct kernels at ``batch``, and the index of each kernel among them."""
        like = 0 if self._linear else batch  # linear kernels that agree at two batches agree at all
        if like not in self._distinct:
            tables = [self.at(1).ops, self.at(2).ops] if like == 0 else [self.at(batch).ops]
            self._distinct[like] = find_distinct_rows(tables)
        return self._distinct[like]

    def grid(self, batch: int) -> tuple[int, ...]:
        """Return ``batch``, or the two batches between which its time is interpolated.

        All batches up to four are predicted, then two per doubling. If kernels are not linear in the batch, so that
        each batch needs a separate graph, one per doubling is predicted, unless the model refuses it.
        """
        steps = self._list_steps(1 << ((batch - 1).bit_length() - 1)) if batch > _DENSE else (batch,)
        if batch in steps:
            return (batch,)
        ends = next(pair for pair in pairwise(steps) if batch < pair[1])
        return ends if self.is_linear() or all(map(self._is_taken, ends)) else (batch,)

    def _list_steps(self, low: int) -> tuple[int, ...]:
        """Return the predicted batches from a power of two to the next."""
        return (low, low + low // 2, 2 * low) if self.is_linear() else (low, 2 * low)

    def host_seconds(self, batch: int) -> float:
        """Return `host_seconds` of the kernels at ``batch``."""
        like = 0 if self._linear else batch  # every batch has the same number of kernels
        if like not in self._host_s:
            self._host_s[like] = host_seconds(self.at(batch), self.runtime, self.host_us)
        return self._host_s[like]

    def at(self, batch: int) -> KernelList:
        """Return the kernels at ``batch``."""
        if batch not in self._known:
            self._known[batch] = (
                self._between(batch) if batch not in _READ and self.is_linear() else self._list_kernels(batch)
            )
        return self._known[batch]

    def _list_kernels(self, batch: int) -> KernelList:
        return list_kernels(self._graph_at(batch), self.precision, self.runtime)

    def is_linear(self) -> bool:
        """Return whether all kernels are linear in the batch."""
        if self._linear is None:
            try:
                at1, at2, at4 = map(self.at, _READ)
            except InputError:
                self._linear = False
                return False
            # By extrapolation from batches 1 and 2, batch 4 is at 3 · at2 - 2 · at1.
            same = at1.op_types == at2.op_types == at4.op_types and at1.count == at2.count == at4.count
            self._linear = same and all(
                np.allclose(getattr(at4.ops, name), 3 * getattr(at2.ops, name) - 2 * getattr(at1.ops, name), rtol=1e-9)
                for name in _LINEAR_COLUMNS
            )
        return self._linear

    def _between(self, batch: int) -> KernelList:
        at1, at2 = self.at(1), self.at(2)
        columns = {
            name: getattr(at1.ops, name) + (batch - 1) * (getattr(at2.ops, name) - getattr(at1.ops, name))
            for name in _LINEAR_COLUMNS
        }
        traffic = {
            name: getattr(at1, name) + (batch - 1) * (getattr(at2, name) - getattr(at1, name))
            for name in ("input_bytes", "output_bytes")
        }
        return replace(at1, ops=OpTable(family=at1.ops.family, **columns), **traffic)


def find_distinct_rows(tables: Sequence[OpTable]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each group of rows that are equal in all tables, and the group of every row."""
    keys = np.column_stack([getattr(table, field.name) for table in tables for field in fields(OpTable)])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    # NumPy 2.0 returns the inverse of unique along an axis in another shape than other versions.
    return first, inverse.reshape(-1)


def host_seconds(kernels: KernelList, runtime: LaunchMode, host_us: float | None = None) -> float:
    """Return the host's time to launch all kernels; ``host_us``: time of a launch, by default the runtime's usual
    time.
    """
    usual = find_constant("host.launch_us", runtime, constant("host.launch_us", runtime.partition(":")[0]))
    scale = 1e-6 if host_us is None else 1e-6 * host_us / usual

    def launch_us(op_type: str) -> float:
        if runtime.is_onnxruntime:
            return usual
        if op_type == LAYOUT_OF_CONVOLUTION:
            return 0.0
        return find_constant("host.pytorch_op_us", op_type, usual) if runtime.is_eager else usual

    return scale * sum(count * launch_us(name) for count, name in zip(kernels.count, kernels.op_types, strict=True))


def copy_seconds(kernels: KernelList, runtime: LaunchMode) -> float:
    """Return the time of copying a batch's inputs to the device and its outputs back; 0 where both
    stay on the device.
    """
    if not runtime.is_onnxruntime or not kernels.count:
        return 0.0
    to_device, to_host = (constant("host.copy_bytes_per_s", name) for name in ("to_device", "to_host"))
    return kernels.input_bytes / to_device + kernels.output_bytes / to_host


def batch_seconds(kernels_s: float, host_s: float, kernels: KernelList, runtime: LaunchMode) -> float:
    """Return the time of a batch from the times of its kernels and of the host.

    The host runs ahead of long kernels, and short kernels wait for the host, so the longer time determines the batch's.
    ONNX Runtime's batches begin and end with synchronous copies; where both times are nearly equal, neither is hidden:
    of 18 batches of four networks on an H200, with measured kernel times, the root of the sum of squares was
    off by 7.7% in the median, the longer of both by 9.9% (``python -m bench.gpu.launches``).
    """
    if not runtime.is_onnxruntime:
        return max(kernels_s, host_s)
    return hypot(kernels_s, host_s) + copy_seconds(kernels, runtime)
