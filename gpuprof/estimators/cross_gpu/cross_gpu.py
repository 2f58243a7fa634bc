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
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cost_model import CostModel
from gpuprof.estimators.cross_gpu.kernels import KernelList, LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable, stack_tables
from gpuprof.estimators.cross_gpu.rates import TENSOR_TYPES, DeviceRates, rates_of, stack_rates
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
        self._distinct: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def precision(self) -> str:
        """The type that products are computed in."""
        return self._precision

    @property
    def runtime(self) -> LaunchMode:
        """How nodes become kernels."""
        return self._runtime

    def list_grid(self, most: int) -> tuple[int, ...]:
        """Return the batches up to ``most`` that are predicted; none where every batch would be."""
        return tuple(one for one in range(1, most + 1) if self.grid(one) == (one,)) if self._is_linear() else ()

    def find_distinct(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the kernels at ``batch`` that are unlike all before them, and which of them each is."""
        like = 0 if self._linear else batch  # kernels that are alike at two batches are so at all
        if like not in self._distinct:
            tables = [self.at(1).ops, self.at(2).ops] if like == 0 else [self.at(batch).ops]
            self._distinct[like] = _find_distinct(tables)
        return self._distinct[like]

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


def _find_distinct(tables: Sequence[OpTable]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of each kind of rows that agree in all tables, and the kind of every row."""
    keys = np.column_stack([getattr(one, field.name) for one in tables for field in fields(OpTable)])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


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
        self, kernels: KernelsByBatch, batches: Sequence[int], device: Device, shares: Sequence[Share]
    ) -> dict[tuple[Share, int], Figure]:
        """Return `latency` under every share at every batch; all together take little longer than one.

        Raises
        ------
        InputError
            As `latency`.
        """
        precision, runtime = kernels.precision, kernels.runtime
        found: dict[tuple[Share, int], Figure] = {}
        rates = [rates_of(device, precision, share) for share in shares]
        for number, seconds in zip(batches, self.totals_s(kernels, batches, rates), strict=True):
            figures = partial(self._figure, kernels=kernels.at(number), device=device, precision=precision)
            found |= {
                (share, number): figures(float(one), runtime=runtime)
                for share, one in zip(shares, seconds, strict=True)
            }
        return found

    def _figure(
        self, seconds: float, kernels: KernelList, device: Device, precision: str, runtime: LaunchMode
    ) -> Figure:
        factor = self.spread.get(kind_of(kernels, device, precision), _UNKNOWN_SPREAD)
        source = f"{SOURCE}: {precision}, {runtime}"
        return Figure(seconds * 1e3, source, seconds * 1e3 / factor, seconds * 1e3 * factor)

    def total_s(self, kernels: KernelList, rates: DeviceRates, runtime: LaunchMode) -> float:
        """Return the seconds of all kernels one after another, or of the host where it takes longer."""
        count = np.array(kernels.count, dtype=float)
        times = self.kernel_times(kernels.ops, rates) if len(kernels.ops) else np.zeros(0)
        return max(float((count * times).sum() + count.sum() * _GAP_S), _host_seconds(kernels, runtime))

    def totals_s(self, kernels: KernelsByBatch, batches: Sequence[int], rates: Sequence[DeviceRates]) -> Array:
        """Return `total_s` at every batch with every one of the rates of one device.

        Returns
        -------
        ndarray of shape (batches, rates)
        """
        lists, distinct = [kernels.at(one) for one in batches], [kernels.find_distinct(one) for one in batches]
        tables = [one.ops.take(first) for one, (first, _) in zip(lists, distinct, strict=True)]
        rows = sum(map(len, tables))
        if not rows:
            return np.zeros((len(batches), len(rates)))
        ops = stack_tables(tables * len(rates))
        times = self.costs.kernel_times(ops, stack_rates(rates, rows)).reshape(len(rates), rows)
        starts = np.cumsum([len(one) for one in tables])[:-1]
        found = []
        for one, (_, place), own in zip(lists, distinct, np.split(times, starts, axis=1), strict=True):
            count = np.array(one.count, dtype=float)
            of_kernels = (count * own[:, place]).sum(axis=1) + count.sum() * _GAP_S
            found.append(np.maximum(of_kernels, _host_seconds(one, kernels.runtime)))
        return np.array(found)

    def kernel_times(self, ops: OpTable, rates: DeviceRates) -> Array:
        """Return the seconds of each kernel; alike ones are computed once."""
        first, place = _find_distinct([ops])
        return np.asarray(self.costs.kernel_times(ops.take(first), rates)[place])


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
