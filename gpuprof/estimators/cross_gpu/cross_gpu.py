"""Estimates models on unmeasured GPUs by models learned on other GPUs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.adaptation import Adaptation, OpPoints, describe_points
from gpuprof.estimators.cross_gpu.cost_model import CostModel
from gpuprof.estimators.cross_gpu.features import bound_times, widen_products
from gpuprof.estimators.cross_gpu.intervals import (
    ErrorScales,
    TimeParts,
    excess_of,
    generation_of,
    launched_as,
    name_kinds,
    name_unlike,
)
from gpuprof.estimators.cross_gpu.kernels import PART_OF_CONVOLUTION, KernelList, LaunchMode
from gpuprof.estimators.cross_gpu.kernels_by_batch import (
    KernelsByBatch,
    batch_seconds,
    copy_seconds,
    find_distinct_rows,
    host_seconds,
)
from gpuprof.estimators.cross_gpu.learned_range import measure_distance
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable, repeat_table, stack_tables
from gpuprof.estimators.cross_gpu.rates import TENSOR_TYPES, DeviceRates, rates_of, stack_rates
from gpuprof.graph.load import read_fixed_batch

SOURCE = "cross-gpu"
#: Gap between two kernels on the GPU.
_GAP_S = 1.0e-6
_METADATA, _INTERVALS = "provenance.json", "intervals.json"
_LEAST_OF_EXPECTED = 0.8
#: Maximum ratio of a wider type's bound to a product's time: above it the wider type is not quicker, even when it saves
#: a convolution its changes of layout.
_NEAR = 2.0
_PRODUCTS = [FAMILIES.index(name) for name in ("matmul", "conv")]
_ATTENTION, _HALF_BYTES = FAMILIES.index("attention"), 2.0


class UnmeasuredModel(Protocol):
    """A model with a name and perhaps a file."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def path(self) -> str | None:
        """Its ONNX file."""


@dataclass(frozen=True, slots=True)
class CrossGpuModel:
    """Trained regressors, and their errors on held-out GPUs."""

    costs: CostModel
    scales: ErrorScales
    adaptation: Adaptation | None = None  #: Correction by ops measured on the target GPU.

    def latency(self, kernels: KernelList, device: Device, share: Share, precision: str, runtime: LaunchMode) -> Figure:
        """Return the time of a batch in ms with its 90% interval.

        Raises `InputError` when the device lacks the precision.
        """
        parts = self.time_parts(kernels, rates_of(device, precision, share), runtime)
        factor = self.scales.widen_model(parts, kind_of(kernels, precision), generation_of(device))
        distance = measure_distance(device, precision)
        factor *= 1.0 if distance is None else distance.factor**parts.unsure
        unlike = name_unlike(kernels.op_types, parts.excess)
        seconds = float(batch_seconds(np.array(parts.kernels_s), parts.host_s, kernels, runtime))
        return self._figure(seconds, factor + parts.excess, _describe(precision, runtime, unlike))

    def latencies(
        self,
        kernels: KernelsByBatch,
        batches: Sequence[int],
        device: Device,
        shares: Sequence[Share],
        *,
        busy: bool = False,
    ) -> dict[tuple[Share, int], Figure]:
        """Return `latency` under every share at every batch, in little more time than a single call.

        ``busy``: whether the rest of the board works, too. Raises `InputError` as `latency` does.
        """
        precision, runtime = kernels.precision, kernels.runtime
        generation = generation_of(device)
        latencies: dict[tuple[Share, int], Figure] = {}
        rates = [rates_of(device, precision, share, busy=busy) for share in shares]
        distance = measure_distance(device, precision)
        beyond = 1.0 if distance is None else distance.factor
        for number, (of_kernels, host, scales, unsure, excess) in zip(
            batches, self._sum_up(kernels, batches, rates), strict=True
        ):
            at = kernels.at(number)
            factors = self.scales.widen_times(of_kernels, host, scales, kind_of(at, precision), generation)
            factors = factors * beyond**unsure + excess
            times = batch_seconds(of_kernels, host, at, runtime)
            for share, seconds, factor, more in zip(
                shares, times.tolist(), factors.tolist(), excess.tolist(), strict=True
            ):
                described = _describe(precision, runtime, name_unlike(at.op_types, more))
                latencies[share, number] = self._figure(seconds, factor, described)
        return latencies

    def board_seconds(self, kernels: KernelsByBatch, batches: Sequence[int], device: Device) -> Figure:
        """Return the least device seconds per batch item on the whole board, host and copies hidden.

        Processes that share the board have a throughput of at most its reciprocal. Raises `InputError` as `latency`
        does.
        """
        rates, generation = [rates_of(device, kernels.precision)], generation_of(device)
        distance = measure_distance(device, kernels.precision)
        ends = []
        for number, (of_kernels, _, scales, unsure, excess) in zip(
            batches, self._sum_up(kernels, batches, rates), strict=True
        ):
            kind = kind_of(kernels.at(number), kernels.precision)
            widened = self.scales.widen_times(of_kernels, 0.0, scales, kind, generation)
            factor = float((widened * (1.0 if distance is None else distance.factor) ** unsure + excess)[0])
            each = float(of_kernels[0]) / number
            ends.append((each, each / factor, each * factor))
        value, low, high = map(min, zip(*ends, strict=True))
        return Figure(value, SOURCE, low, high)

    def time_whole(self, kernels: KernelsByBatch, asked: Sequence[tuple[Device, int]]) -> list[float]:
        """Return the seconds of batches on whole GPUs whose cores are of the same kinds, so that the kernels are the
        same.

        Raises `InputError` when a device lacks the precision.
        """
        ops, rates = self._stack_whole(kernels, asked, wider=True)
        times, wider, *_ = self._predict(ops, rates)
        ends = np.cumsum([len(kernels.find_distinct(batch)[0]) for _, batch in asked])[:-1]
        found = []
        for (_, batch), own, other in zip(asked, np.split(times, ends), np.split(wider, ends), strict=True):
            place = kernels.find_distinct(batch)[1]
            seconds = float(_sum_quicker(kernels.at(batch), own[place], other[place]).sum())
            host_s = kernels.host_seconds(batch)
            found.append(float(batch_seconds(np.array(seconds), host_s, kernels.at(batch), kernels.runtime)))
        return found

    def bound_whole(self, kernels: KernelsByBatch, asked: Sequence[tuple[Device, int]]) -> list[float]:
        """Return lower bounds of `time_whole` in seconds: nearly all ops are predicted above their expected bound.

        Raises `InputError` as `time_whole` does.
        """
        least = _LEAST_OF_EXPECTED * bound_times(*self._stack_whole(kernels, asked, wider=False)).expected_s
        ends = np.cumsum([len(kernels.find_distinct(batch)[0]) for _, batch in asked])[:-1]
        found = []
        for (_, batch), own in zip(asked, np.split(least, ends), strict=True):
            count = np.array(kernels.at(batch).count, dtype=float)
            of_kernels = float(count @ (own[kernels.find_distinct(batch)[1]] + _GAP_S))
            found.append(of_kernels + copy_seconds(kernels.at(batch), kernels.runtime))
        return found

    @staticmethod
    def _stack_whole(
        kernels: KernelsByBatch, asked: Sequence[tuple[Device, int]], *, wider: bool
    ) -> tuple[OpTable, DeviceRates]:
        """Return the concatenated distinct ops of all batches, and the rates of its device for each op.

        ``wider``: also the rates of wider types, present on all devices or on none.
        """
        tables = {batch: kernels.at(batch).ops.take(kernels.find_distinct(batch)[0]) for _, batch in asked}
        each = {device.name: device for device, _ in asked}
        rates = {name: rates_of(device, kernels.precision) for name, device in each.items()}
        if not wider:
            rates = {name: replace(one, instead=None) for name, one in rates.items()}
        stacked = stack_tables([tables[batch] for _, batch in asked])
        rows = [len(tables[batch]) for _, batch in asked]
        return stacked, stack_rates([rates[device.name] for device, _ in asked], rows)

    def time_parts(self, kernels: KernelList, rates: DeviceRates, runtime: LaunchMode) -> TimeParts:
        """Return the parts of a model's time: sequential kernels, and the host, of which the longer counts."""
        first, place = find_distinct_rows([kernels.ops])
        times, wider, uncertainty, kinds = self._predict(kernels.ops.take(first), rates)
        seconds = _sum_quicker(kernels, times[place], wider[place])
        names, kind = np.unique(kinds[place], return_inverse=True)
        of_kinds = np.bincount(kind.reshape(-1), seconds, len(names)).tolist()
        by_kind = {str(name): part for name, part in zip(names, of_kinds, strict=True)}
        total = float(seconds.sum())
        unsure = float(seconds @ uncertainty[place] / total) if total > 0.0 else 1.0
        excess = float((seconds * uncertainty[place]) @ excess_of(kernels.op_types) / total) if total > 0.0 else 0.0
        return TimeParts(total, host_seconds(kernels, runtime), by_kind, unsure, excess)

    def _sum_up(
        self, kernels: KernelsByBatch, batches: Sequence[int], rates: Sequence[DeviceRates]
    ) -> list[tuple[Array, float, Array, Array, Array]]:
        """Return for every batch, under each of a device's rates, the kernels' seconds, the host's seconds, the
        kernels' mean error scale (reduced by measurements), its remaining part after measurements, and the mean of
        `excess_of`: arrays of shape (rates,).
        """
        lists, distinct = [kernels.at(one) for one in batches], [kernels.find_distinct(one) for one in batches]
        tables = [one.ops.take(first) for one, (first, _) in zip(lists, distinct, strict=True)]
        rows = sum(map(len, tables))
        if not rows:
            nothing = np.zeros(len(rates))
            return [(nothing, 0.0, nothing, np.ones(len(rates)), nothing)] * len(batches)
        ops = repeat_table(stack_tables(tables), len(rates))
        times, wider, uncertainty, kinds = self._predict(ops, stack_rates(rates, rows))
        scale = uncertainty.reshape(len(rates), rows) * self.scales.scale_ops(kinds[:rows])
        starts = np.cumsum([len(one) for one in tables])[:-1]
        parts = (np.split(one.reshape(len(rates), rows), starts, axis=1) for one in (times, wider, scale, uncertainty))
        split = zip(*parts, strict=True)
        sums = []
        for batch, kernel_list, (_, place), of_batch in zip(batches, lists, distinct, split, strict=True):
            own, other, scales, unsure = of_batch
            seconds = _sum_quicker(kernel_list, own[:, place], other[:, place])
            total = seconds.sum(axis=1)
            excess = unsure[:, place] * excess_of(kernel_list.op_types)
            columns = (scales[:, place], unsure[:, place], excess)
            means = ((seconds * column).sum(axis=1) / total for column in columns)
            sums.append((total, kernels.host_seconds(batch), *means))
        return sums

    def _predict(self, ops: OpTable, rates: DeviceRates) -> tuple[Array, Array, Array, NDArray[np.str_]]:
        """Return the seconds of each kernel, those in a wider type (infinite where there is none), the part of its
        error that remains after the GPU's measurements, and its kind.
        """
        times = self.costs.kernel_times(ops, rates)
        wider = self._widened_times(ops, rates, times)
        kinds = name_kinds(ops, rates.tensor)
        if self.adaptation is None or not len(ops):
            return times, wider, np.ones(len(ops)), kinds
        shift, left = self.adaptation.correct(self._points(ops, kinds, times))
        moved = np.exp(shift)
        return np.maximum(times * moved, bound_times(ops, rates).hard_s), wider * moved, left, kinds

    def _widened_times(self, ops: OpTable, rates: DeviceRates, narrow: Array) -> Array:
        """Return the seconds of products in the quickest type wider than the rates'; infinity for other kernels and for
        products far slower than ``narrow``.
        """
        times = np.full(len(ops), np.inf)
        if rates.instead is not None:
            rows = np.flatnonzero(_may_widen(ops, rates, rates.instead))
            its_rates = rates.instead.take(rows)
            wider = widen_products(ops.take(rows), its_rates.width)
            bounds = bound_times(wider, its_rates)
            # In 16 bits, a wider type saves a convolution no changes of layout.
            least = bounds.hard_s / _NEAR if rates.width > _HALF_BYTES else _LEAST_OF_EXPECTED * bounds.expected_s
            near = np.flatnonzero(least < narrow[rows])
            table, of_table = wider.take(near), its_rates.take(near)
            found = self.costs.kernel_times(table, of_table, bounds.take(near))
            times[rows[near]] = np.minimum(found, self._widened_times(table, of_table, found))
        return times

    def observe(
        self, ops: OpTable, rates: DeviceRates, measured_s: Array, alone: NDArray[np.bool_]
    ) -> tuple[OpPoints, Array]:
        """Return measured ops as points for `adaptation.adapt`, and measured over predicted times.

        Parameters
        ----------
        measured_s : ndarray of shape (N,)
        alone : ndarray of shape (N,)
            Whether an op was timed with its launch.
        """
        times, kinds = self.costs.kernel_times(ops, rates), name_kinds(ops, rates.tensor)
        launch_s = np.array([self.costs.floor_s.get(launched_as(str(kind)), 0.0) for kind in kinds]) * alone
        return self._points(ops, kinds, times, launch_s), measured_s / (times + launch_s)

    def _points(self, ops: OpTable, kinds: NDArray[np.str_], times: Array, launch_s: Array | float = 0.0) -> OpPoints:
        like = np.char.add(np.char.add(kinds, " "), ops.width.astype(np.int64).astype(str))  # precisions are not mixed
        return describe_points(ops, like, times, self.scales.scale_ops(kinds), launch_s)

    def _figure(self, seconds: float, factor: float, source: str) -> Figure:
        if self.adaptation is not None:
            source += f", {len(self.adaptation.weights)} ops measured"
        return Figure(seconds * 1e3, source, seconds * 1e3 / factor, seconds * 1e3 * factor)

    def kernel_times(self, ops: OpTable, rates: DeviceRates) -> Array:
        """Return the seconds of each kernel; equal kernels are computed once."""
        first, place = find_distinct_rows([ops])
        return np.asarray(self.costs.kernel_times(ops.take(first), rates)[place])


def _may_widen(ops: OpTable, rates: DeviceRates, wider: DeviceRates) -> NDArray[np.bool_]:
    """Return whether each op has a kernel in a wider type; attention in 16 bits or fewer has none above 16."""
    attention = np.max(wider.width) <= max(float(np.max(rates.width)), _HALF_BYTES)
    return np.isin(ops.family, [*_PRODUCTS, _ATTENTION] if attention else _PRODUCTS)


def _sum_quicker(kernels: KernelList, times: Array, wider: Array) -> Array:
    """Return the seconds of every kernel. Where a convolution is quicker in the wider type, the kernels that it
    launches besides are scaled away with it.

    Parameters
    ----------
    times, wider : ndarray of shape (..., N)
        Of a single run of a kernel.

    Returns
    -------
    ndarray of shape (..., N)
    """
    seconds = np.array(kernels.count, dtype=float) * (times + _GAP_S)
    if not np.isfinite(wider).any():
        return np.asarray(seconds)
    starts = np.array([place for place, name in enumerate(kernels.op_types) if name != PART_OF_CONVOLUTION])
    whole = np.add.reduceat(seconds, starts, axis=-1)
    other = np.array(kernels.count, dtype=float)[starts] * (wider[..., starts] + _GAP_S)
    sizes = np.diff([*starts, len(kernels.op_types)])
    return np.asarray(seconds * np.repeat(np.minimum(1.0, other / whole), sizes, axis=-1))


def _describe(precision: str, runtime: LaunchMode, unlike: Sequence[str]) -> str:
    return f"{SOURCE}: {precision}, {runtime}" + (f", nothing measured like {', '.join(unlike)}" if unlike else "")


def only_batch_of(known: UnmeasuredModel) -> int | None:
    """Return the fixed batch of a model, None where any batch is accepted."""
    path = Path(known.path or "")
    return read_fixed_batch(path) if path.is_file() else None


def kind_of(kernels: KernelList, precision: str) -> str:
    """Return the kind of a model, a key of `ErrorScales.model_factors`: models of a kind have similar errors.

    Kinds differ by the arithmetic, mostly of convolutions or of other products, on CUDA or on tensor cores. Models in
    double precision were not measured.
    """
    flops = np.asarray(kernels.ops.flops) * np.array(kernels.count, dtype=float)
    convolved = float(flops[kernels.ops.family == FAMILIES.index("conv")].sum())
    multiplied = float(flops[np.isin(kernels.ops.family, [*_PRODUCTS, _ATTENTION])].sum())
    part = "convolutions" if convolved > multiplied / 2 else "products"
    cores = "double" if precision == "float64" else "cores"
    return f"{part} {'tensor' if precision in TENSOR_TYPES else cores}"


def trained_folder() -> Traversable:
    """Return the folder of the shipped regressors."""
    return datasets() / "cross_gpu"


@cache
def shipped_model() -> CrossGpuModel:
    """Return the shipped model; every file is checked against its hash in the provenance.

    Raises `InputError` when a file is missing or differs from the trained file.
    """
    known, files = read_trained_files(trained_folder())
    scales = ErrorScales.of_text(files.pop(_INTERVALS).decode())
    trees = {name.removesuffix(".onnx"): content for name, content in files.items()}
    return CrossGpuModel(CostModel.of_files(trees, known["floor_s"]), scales)


def read_trained_files(folder: Traversable) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """Return the provenance in a shipped folder, and each file with a hash there, by name.

    Raises `InputError` when a file is missing or differs from the trained file.
    """
    try:
        known: Mapping[str, Any] = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
        files = {name: (folder / name).read_bytes() for name in known["sha256"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the trained regressors cannot be read: {error}", "reinstall gpuprof") from None
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != known["sha256"][name]:
            raise InputError(f"{name} is not the file that was trained", "reinstall gpuprof")
    return known, files
