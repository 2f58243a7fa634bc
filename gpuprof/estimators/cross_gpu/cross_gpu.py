"""Estimates models on GPUs of which nothing was measured, from what was learned on others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cost_model import CostModel
from gpuprof.estimators.cross_gpu.execution import Execution, type_of_weights
from gpuprof.estimators.cross_gpu.kernels import KernelList, LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable, stack_tables
from gpuprof.estimators.cross_gpu.rates import TENSOR_TYPES, DeviceRates, rates_of
from gpuprof.graph.load import only_batch

SOURCE = "cross-gpu"
#: Of a kernel: between it and the one before on the GPU; of the host, which goes ahead and is waited for where the
#: kernels are shorter: PyTorch's dispatcher takes about 9 us an op, a runtime with a ready plan 4. What cuDNN does
#: takes longer to set up: so much that ResNets, DenseNet and MobileNet at batch 1 and 4 take 0.9 to 1.3 times their
#: measured times, on the hosts of the thesis (V100) and of ParvaGPU (A100).
_GAP_S = 1.0e-6
_HOST_S: Mapping[LaunchMode, float] = {LaunchMode.EAGER: 9e-6, LaunchMode.FUSED: 4e-6}
_EAGER_HOST_S: Mapping[str, float] = {"Conv": 50e-6, "ConvTranspose": 50e-6, "BatchNormalization": 40e-6}
_METADATA = "provenance.json"
_VOLTA = 7.0
#: Where no measurement of others speaks for a kind of model.
_UNKNOWN_SPREAD = 2.5
#: Every batch up to this is predicted, of larger ones two in each doubling; those between lie on a line.
_DENSE = 4
_LINEAR_COLUMNS = tuple(field.name for field in fields(OpTable) if field.name != "family")


class UnmeasuredModel(Protocol):
    """A model with a name and perhaps a file."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def path(self) -> str | None:
        """Its ONNX file."""
        ...


class KernelsByBatch:
    """The kernels of a model at any batch, from its graph at two of them where all is in proportion."""

    def __init__(self, graph_at: Callable[[int], ModelGraph], precision: str, runtime: LaunchMode) -> None:
        self._graph_at, self._precision, self._runtime = graph_at, precision, runtime
        self._known: dict[int, KernelList] = {}
        self._linear: bool | None = None

    def grid(self, batch: int) -> tuple[int, ...]:
        """Return ``batch``, or the two batches between which its time lies on a line.

        Predicted are all batches up to four, then two in each doubling. Where kernels are not in proportion to the
        batch, each is predicted: nothing is known of those between.
        """
        if batch <= _DENSE or not self._is_linear():
            return (batch,)
        low = 1 << ((batch - 1).bit_length() - 1)
        steps = (low, low + low // 2, 2 * low)
        return (batch,) if batch in steps else steps[:2] if batch < steps[1] else steps[1:]

    def at(self, batch: int) -> KernelList:
        """Return the kernels at ``batch``."""
        if batch not in self._known:
            self._known[batch] = self._between(batch) if batch > 4 and self._is_linear() else self._list_kernels(batch)
        return self._known[batch]

    def _list_kernels(self, batch: int) -> KernelList:
        return list_kernels(self._graph_at(batch), self._precision, self._runtime)

    def _is_linear(self) -> bool:
        if self._linear is None:
            try:
                one, two, four = self.at(1), self.at(2), self.at(4)
            except InputError:
                self._linear = False
                return False
            same = one.op_types == two.op_types == four.op_types and one.count == two.count == four.count
            self._linear = same and all(
                np.allclose(getattr(four.ops, name), 3 * getattr(two.ops, name) - 2 * getattr(one.ops, name), rtol=1e-9)
                for name in _LINEAR_COLUMNS
            )
        return self._linear

    def _between(self, batch: int) -> KernelList:
        one, two = self.at(1), self.at(2)
        columns = {
            name: getattr(one.ops, name) + (batch - 1) * (getattr(two.ops, name) - getattr(one.ops, name))
            for name in _LINEAR_COLUMNS
        }
        return replace(one, ops=OpTable(family=one.ops.family, **columns))


@dataclass(frozen=True, slots=True)
class CrossGpuModel:
    """What was learned: regressors, and how far they are off for a GPU that they have not seen.

    Attributes
    ----------
    costs : CostModel
    spread : mapping of str to float
        By what `kind_of` says: the factor f so that [t / f, t f] held nine of ten times of GPUs left out.
    """

    costs: CostModel
    spread: Mapping[str, float]

    def latency(self, kernels: KernelList, device: Device, share: Share, precision: str, runtime: LaunchMode) -> Figure:
        """Return the time of one batch in ms with its 90% interval.

        Raises
        ------
        InputError
            When the device lacks the precision.
        """
        seconds = self.total_s(kernels, rates_of(device, precision, share), runtime)
        return self._figure(seconds, kernels, device, precision, runtime)

    def latencies(
        self, kernels: Sequence[KernelList], device: Device, share: Share, precision: str, runtime: LaunchMode
    ) -> list[Figure]:
        """Return `latency` of several lists of kernels; together they take little longer than one.

        Raises
        ------
        InputError
            As `latency`.
        """
        seconds = self.totals_s(kernels, rates_of(device, precision, share), runtime)
        pairs = zip(seconds, kernels, strict=True)
        return [self._figure(total, one, device, precision, runtime) for total, one in pairs]

    def _figure(
        self, seconds: float, kernels: KernelList, device: Device, precision: str, runtime: LaunchMode
    ) -> Figure:
        factor = self.spread.get(kind_of(kernels, device, precision), _UNKNOWN_SPREAD)
        source = f"{SOURCE}: {precision}, {runtime}"
        return Figure(seconds * 1e3, source, seconds * 1e3 / factor, seconds * 1e3 * factor)

    def total_s(self, kernels: KernelList, rates: DeviceRates, runtime: LaunchMode) -> float:
        """Return the seconds of all kernels one after another, or of the host where it takes longer."""
        return self.totals_s([kernels], rates, runtime)[0]

    def totals_s(self, kernels: Sequence[KernelList], rates: DeviceRates, runtime: LaunchMode) -> list[float]:
        """Return `total_s` of each list of kernels."""
        lengths = [len(one.ops) for one in kernels]
        times = self.kernel_times(stack_tables([one.ops for one in kernels]), rates) if sum(lengths) else np.zeros(0)
        found = []
        for one, own in zip(kernels, np.split(times, np.cumsum(lengths)[:-1]), strict=True):
            count = np.array(one.count, dtype=float)
            found.append(max(float((count * own).sum() + count.sum() * _GAP_S), _host_seconds(one, runtime)))
        return found

    def kernel_times(self, ops: OpTable, rates: DeviceRates) -> Array:
        """Return the seconds of each kernel; alike ones are computed once."""
        keys = np.column_stack([getattr(ops, field.name) for field in fields(OpTable)])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return np.asarray(self.costs.kernel_times(ops.take(first), rates)[inverse.reshape(-1)])


def _host_seconds(kernels: KernelList, runtime: LaunchMode) -> float:
    """Return what the host takes to launch all kernels."""
    own = _EAGER_HOST_S if runtime is LaunchMode.EAGER else {}
    pairs = zip(kernels.count, kernels.op_types, strict=True)
    return sum(count * own.get(op_type, _HOST_S[runtime]) for count, op_type in pairs)


def only_batch_of(known: UnmeasuredModel) -> int | None:
    """Return the batch that a model fixes, None where it takes any."""
    path = Path(known.path or "")
    return only_batch(path) if path.is_file() else None


def kind_of(kernels: KernelList, device: Device, precision: str) -> str:
    """Return which models on which GPUs are estimated alike well, as keys of `CrossGpuModel.spread`.

    Most of the arithmetic is of convolutions or of other products, on CUDA or on tensor cores; GPUs before Volta run
    kernels that were made for others.
    """
    flops = np.asarray(kernels.ops.flops) * np.array(kernels.count, dtype=float)
    convolved = float(flops[kernels.ops.family == FAMILIES.index("conv")].sum())
    part = "convolutions" if convolved > flops.sum() / 2 else "products"
    cores = "tensor" if precision in TENSOR_TYPES else "cores"
    return f"{part} {cores}" + (" old" if float(device.compute_capability or 0) < _VOLTA else "")


def trained_folder() -> Traversable:
    """Return where the trained regressors ship."""
    return datasets() / "cross_gpu"


@cache
def shipped_model() -> CrossGpuModel:
    """Return what ships with gpuprof; every file is checked against the hash in the provenance.

    Raises
    ------
    InputError
        When a file is missing or is not the one that was trained.
    """
    folder = trained_folder()
    try:
        known: Mapping[str, Any] = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
        texts = {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in known["sha256"]}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"the trained regressors cannot be read: {error}", "reinstall gpuprof") from None
    for name, text in texts.items():
        if hashlib.sha256(text.encode()).hexdigest() != known["sha256"][name]:
            raise InputError(f"{name}.txt is not the regressor that was trained", "reinstall gpuprof")
    return CrossGpuModel(CostModel.of_texts(texts, known["floor_s"]), known["spread"])


class LatencyCurve:
    """Times of one model under one share of a device at any batch, predicted for many batches at once."""

    def __init__(
        self, kernels: KernelsByBatch, device: Device, share: Share, precision: str, runtime: LaunchMode
    ) -> None:
        self._kernels, self._device, self._share = kernels, device, share
        self._precision, self._runtime = precision, runtime
        self._known: dict[int, Figure] = {}

    def at(self, batch: int) -> Figure:
        """Return the time of one batch in ms; between two batches of the grid it lies on a line.

        Raises
        ------
        InputError
            When the device lacks the precision, or the model does not take the batch.
        """
        if batch not in self._known:
            grid = self._kernels.grid(batch)
            if missing := [one for one in grid if one not in self._known]:
                self._predict(missing)
            if batch not in self._known:
                self._known[batch] = self._interpolate(grid[0], batch, grid[1])
        return self._known[batch]

    def _predict(self, batches: Sequence[int]) -> None:
        kernels = [self._kernels.at(batch) for batch in batches]
        found = shipped_model().latencies(kernels, self._device, self._share, self._precision, self._runtime)
        self._known.update(zip(batches, found, strict=True))

    def _interpolate(self, low: int, batch: int, high: int) -> Figure:
        one, two = self._known[low], self._known[high]
        value = one.value + (two.value - one.value) * (batch - low) / (high - low)
        return one.scale_by(value / one.value) if one.value > 0.0 else replace(one, value=value)


class CrossGpuLatencies:
    """Times of models on GPUs, their kernels kept.

    Parameters
    ----------
    execution : Execution
    graph_of : callable
        Known model and batch → its graph.
    """

    def __init__(self, execution: Execution, graph_of: Callable[[Any, int], ModelGraph]) -> None:
        self._execution, self._graph_of = execution, graph_of
        self._kernels: dict[tuple[str, str], KernelsByBatch] = {}
        self._curves: dict[tuple[object, ...], LatencyCurve] = {}
        self._types: dict[str, str] = {}

    def predict(self, known: UnmeasuredModel, device: Device, batch: int, share: Share) -> Figure:
        """Return the time of one batch in ms on ``share`` of ``device``.

        Raises
        ------
        InputError
            When the device lacks the precision, or the model does not take the batch.
        """
        key = (known.name, device.name, device.max_power_w, share)
        if key not in self._curves:  # a placement asks thousands of times
            if known.name not in self._types:
                self._types[known.name] = type_of_weights(self._graph_of(known, only_batch_of(known) or 1))
            precision = self._execution.rate_name(device, self._types[known.name])
            kernels = self._kernels.get((known.name, precision))
            if kernels is None:
                kernels = KernelsByBatch(partial(self._graph_of, known), precision, self._execution.runtime)
                self._kernels[known.name, precision] = kernels
            self._curves[key] = LatencyCurve(kernels, device, share, precision, self._execution.runtime)
        return self._curves[key].at(batch)
