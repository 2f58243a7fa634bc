"""Estimates models on unmeasured GPUs by models learned on other GPUs, with intervals from the errors on held-out GPUs.

The scale of a kind of op is the logarithmic error within which nine of ten ops stayed on held-out GPUs. A conformal
factor is the number of scales that hold nine of ten ops of a further GPU; a second factor, by kind of model, is the
number of mean scales of a model's kernels that hold its time, since the errors of its ops cancel in part. Host time has
a scale of its own, the spread between hosts. `bench.unseen_intervals` fits all of them.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.resources.abc import Traversable
from math import exp, hypot
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.features import (
    FAMILIES,
    TENSOR_TYPES,
    VOLTA,
    Array,
    CostModel,
    DeviceRates,
    Forests,
    OpTable,
    attention_kinds,
    rates_of,
    stack_rates,
    stack_tables,
)
from gpuprof.estimators.cross_gpu.kernels import (
    Execution,
    KernelList,
    KernelsByBatch,
    LaunchMode,
    batch_seconds,
    copy_seconds,
    find_distinct_rows,
    host_seconds,
    type_of_weights,
)
from gpuprof.estimators.cross_gpu.node_groups import RECURRENT
from gpuprof.graph.load import read_fixed_batch

_OLD = " old"
#: Op types unlike any measured type → maximum ratio of their time to the prediction, a guess. Recurrent layers of a
#: runtime may stay on the GPU for all steps or launch several kernels in each; sums of products, scattering and
#: sampling depend on their implementation and on the data; sorting, counting and control flow make the host wait.
_UNLIKE_MEASURED = dict.fromkeys(
    (*RECURRENT, "Einsum", "Scatter", "ScatterElements", "ScatterND", "GridSample", "DeformConv", "DFT", "STFT"), 4.0
) | dict.fromkeys(("If", "Loop", "Scan", "TopK", "NonZero", "Unique", "Compress", "CumSum", "CumProd"), 10.0)
#: Stands for all kinds of models of a generation.
ANY_MODEL = "any"


def generation_of(device: Device) -> str:
    """Return the suffix of kinds of ops and models for GPUs before Volta, which run kernels made for other GPUs."""
    return _OLD if float(device.compute_capability or 0) < VOLTA else ""


def name_kinds(ops: OpTable, tensor: bool) -> NDArray[np.str_]:
    """Return the kind of each op, a key of `ErrorScales.ops`; ``tensor``: products run on tensor cores."""
    names = np.array([{"movement": "elementwise"}.get(family, family) for family in FAMILIES])[ops.family].astype(
        "<U20"
    )
    product = np.isin(names, ("matmul", "conv"))
    if tensor:
        names = np.where(product, np.where(ops.width > 1.0, "product tensor", "product narrow"), names)
    else:
        names = np.where(names == "matmul", np.where(ops.extra > 0.0, "batched product", "product"), names)
    names = np.where(ops.width > 4.0, "double", names)  # without measurements
    kinds = np.where(ops.row > 1.0, "batched product", attention_kinds(ops))  # by blocks of heads (`block_seconds`)
    return np.where(names == "attention", kinds, names)


@lru_cache(maxsize=1_000)
def excess_of(op_types: tuple[str, ...]) -> Array:
    """Return for each kernel the extra time, in multiples of the prediction, that op types unlike any measured may
    take.

    Returns
    -------
    ndarray of shape (N,)
    """
    return np.array([_UNLIKE_MEASURED.get(op_type, 1.0) - 1.0 for op_type in op_types])


def name_unlike(op_types: Sequence[str], excess: float) -> tuple[str, ...]:
    """Return the op types unlike any measured type that may take a tenth of a model's time, sorted.

    ``excess``: mean of `excess_of` over the time of the model.
    """
    names = sorted(_UNLIKE_MEASURED.keys() & set(op_types))
    most = max((_UNLIKE_MEASURED[name] - 1.0 for name in names), default=1.0)
    return tuple(names) if excess > 0.1 * most else ()


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Parts of a model's time."""

    #: ``kernels_s``, ``host_s``: Seconds of all kernels in sequence, and of launching by the host: the longer counts.
    kernels_s: float
    host_s: float
    by_kind: Mapping[str, float]  #: Kind of op → its part of the kernels' time.
    excess: float = 0.0  #: Mean of `excess_of` over the kernels' time.

    @property
    def total_s(self) -> float:
        """Seconds of a batch."""
        return max(self.kernels_s, self.host_s)


@dataclass(frozen=True, slots=True)
class ErrorScales:
    """Errors on held-out GPUs, as logarithms of factors, and factors that multiply them."""

    ops: Mapping[str, float]  #: `name_kinds` → scale.
    op_factors: Mapping[str, float]  #: `generation_of` → scales that hold nine of ten ops.
    #: Kind of model, or `ANY_MODEL`, and generation → mean scales of its kernels that hold nine of ten models.
    model_factors: Mapping[str, float]
    host: float  #: Error of a host's time, by which hosts differ from their mean.

    def mean_scale(self, by_kind: Mapping[str, float]) -> float:
        """Return the mean scale of a model's kernels, weighted by each kind's fraction of the time."""
        total = sum(by_kind.values())
        if total <= 0.0:
            return median(self.ops.values()) if self.ops else 1.0
        most = max(self.ops.values(), default=1.0)
        return sum(self.ops.get(kind, most) * part for kind, part in by_kind.items()) / total

    def widen_model(
        self, parts: TimeParts, kind: str, generation: str, *, named_host: bool = False, is_compared: bool = True
    ) -> tuple[float, float]:
        """Return the ends in seconds of the interval that holds the time of a model nine of ten times.

        Errors of kernels and host are independent, so that at each end only one of them is at its limit. The shortest
        time has the shorter hidden behind the longer; at the upper end neither is hidden, as in `batch_seconds`. With a
        given launch time, the host's is as certain as the kernels'. ``is_compared``: whether such estimates were
        compared with measurements; else, and where no factor was fitted to the kind, the errors of ops are not assumed
        to cancel.
        """
        factor = self.model_factors.get(kind + generation, self.model_factors[ANY_MODEL + generation])
        is_fitted = any(kind + suffix in self.model_factors for suffix in ("", _OLD))
        if not (is_compared and is_fitted):
            factor = max(factor, self.op_factors[generation])
        spread = exp(factor * self.mean_scale(parts.by_kind))
        of_host = spread if named_host else exp(self.host)
        low_s = max(parts.kernels_s / spread, parts.host_s / of_host)
        high_s = max(hypot(parts.kernels_s * spread, parts.host_s), hypot(parts.kernels_s, parts.host_s * of_host))
        return low_s / (1.0 + parts.excess), high_s + parts.excess * (parts.kernels_s + parts.host_s)


#: Source of a figure that no measurement was held against.
NEVER_COMPARED = "never compared"

_Key = tuple[str, str, str]


def list_compared_boards(runtime: LaunchMode, precision: str, kind: str) -> frozenset[str]:
    """Return the boards on which such estimates were compared; ``kind``: of the model, as `cross_gpu.kind_of`.

    Where networks have no attention, or attention is never fused, its fusion makes no difference.
    """
    return _read_compared().get(_make_key(runtime, precision, kind.partition(" ")[0]), frozenset())


def describe_evidence(boards: frozenset[str], board: str) -> str | None:
    """Return a remark that estimates were never compared on a board, or on any; None where they were."""
    if board in boards:
        return None
    return f"{NEVER_COMPARED} on this board" if boards else NEVER_COMPARED


@cache
def _read_compared() -> Mapping[_Key, frozenset[str]]:
    content = (datasets() / "cross_gpu" / "compared.toml").read_text(encoding="utf-8")
    compared: dict[_Key, frozenset[str]] = {}
    for entry in tomllib.loads(content)["compared"]:
        key = _make_key(LaunchMode(entry["runtime"]), entry["precision"], entry["family"])
        compared[key] = compared.get(key, frozenset()) | set(entry["boards"])
    return compared


def _make_key(runtime: LaunchMode, precision: str, family: str) -> _Key:
    fuses = precision in TENSOR_TYPES - {"tfloat32"} and family == "products"
    return (runtime if fuses else runtime.partition(":")[0]), precision, family


SOURCE = "cross-gpu"
_METADATA, _INTERVALS = "provenance.json", "intervals.json"


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

    def latency(self, kernels: KernelList, device: Device, share: Share, precision: str, runtime: LaunchMode) -> Figure:
        """Return the time of a batch in ms with its 90% interval.

        Raises `InputError` when the device lacks the precision.
        """
        parts = self.time_parts(kernels, rates_of(device, precision, share), runtime)
        return self._widen(parts, kernels, device, precision, runtime)

    def latencies(
        self,
        kernels: KernelsByBatch,
        batches: Sequence[int],
        device: Device,
        shares: Sequence[Share],
        *,
        busy: bool = False,
    ) -> dict[Share, dict[int, Figure]]:
        """Return `latency` under every share at every batch, in little more time than at one.

        ``busy``: whether the rest of the board works, too. Raises `InputError` as `latency` does.
        """
        rates = [rates_of(device, kernels.precision, share, busy=busy) for share in shares]

        def widen(batch: int, parts: TimeParts) -> Figure:
            return self._widen(parts, kernels.at(batch), device, kernels.precision, kernels.runtime, kernels.host_us)

        return {
            share: {batch: widen(batch, parts) for batch, parts in zip(batches, of_share, strict=True)}
            for share, of_share in zip(shares, self._sum_up(kernels, batches, rates), strict=True)
        }

    def board_seconds(self, kernels: KernelsByBatch, batches: Sequence[int], device: Device) -> Figure:
        """Return a lower bound of device seconds per batch item on the whole board, with host time and copies hidden.

        Processes that share the board have a throughput of at most its reciprocal. Raises `InputError` as `latency`
        does.
        """
        ends = []
        (of_board,) = self._sum_up(kernels, batches, [rates_of(device, kernels.precision)])
        for batch, parts in zip(batches, of_board, strict=True):
            hidden = replace(parts, host_s=0.0)
            kind = kind_of(kernels.at(batch), kernels.precision)
            is_compared = bool(list_compared_boards(kernels.runtime, kernels.precision, kind))
            interval = self.scales.widen_model(hidden, kind, generation_of(device), is_compared=is_compared)
            ends.append([seconds / batch for seconds in (parts.kernels_s, *interval)])
        value, low, high = map(min, zip(*ends, strict=True))
        return Figure(value, SOURCE, low, high)

    def time_parts(self, kernels: KernelList, rates: DeviceRates, runtime: LaunchMode) -> TimeParts:
        """Return the parts of a model's time: kernels in sequence, and the host; the longer determines the time."""
        times, kinds = self.kernel_times(kernels.ops, rates), name_kinds(kernels.ops, rates.tensor)
        return _sum_kernels(kernels, times, kinds, host_seconds(kernels, runtime))

    def _sum_up(
        self, kernels: KernelsByBatch, batches: Sequence[int], rates: Sequence[DeviceRates]
    ) -> list[list[TimeParts]]:
        """Return `time_parts` at all rates and batches, whose distinct kernels are predicted together."""
        distinct = [kernels.find_distinct(batch) for batch in batches]
        tables = [kernels.at(batch).ops.take(first) for batch, (first, _) in zip(batches, distinct, strict=True)]
        ops, kinds = stack_tables(tables), name_kinds(stack_tables(tables), rates[0].tensor)
        rows = np.tile(np.arange(len(ops)), len(rates))
        times = self.costs.kernel_times(ops.take(rows), stack_rates(rates, len(ops))).reshape(len(rates), -1)
        parts = list(zip(batches, np.cumsum([0, *map(len, tables)]), distinct, strict=False))
        return [
            [
                _sum_kernels(kernels.at(batch), row[start + place], kinds[start + place], kernels.host_seconds(batch))
                for batch, start, (_, place) in parts
            ]
            for row in times
        ]

    def _widen(
        self,
        parts: TimeParts,
        kernels: KernelList,
        device: Device,
        precision: str,
        runtime: LaunchMode,
        host_us: float | None = None,
    ) -> Figure:
        boards = list_compared_boards(runtime, precision, kind := kind_of(kernels, precision))
        named_host, is_compared = host_us is not None, bool(boards)
        interval = self.scales.widen_model(
            parts, kind, generation_of(device), named_host=named_host, is_compared=is_compared
        )
        copies_s = copy_seconds(kernels, runtime)
        low, high = (1e3 * (seconds + copies_s) for seconds in interval)
        unlike = name_unlike(kernels.op_types, parts.excess)
        source = f"{SOURCE}: {precision}, {runtime}"
        if unlike:
            source += f", nothing measured like {', '.join(unlike)}"
        if host_us is not None:
            source += f", {host_us:g} us a launch"
        if (doubt := describe_evidence(boards, device.name)) is not None:
            source += f", {doubt}"
        return Figure(1e3 * batch_seconds(parts.kernels_s, parts.host_s, kernels, runtime), source, low, high)

    def kernel_times(self, ops: OpTable, rates: DeviceRates) -> Array:
        """Return the seconds of each kernel; equal kernels are computed once."""
        first, place = find_distinct_rows([ops])
        return np.asarray(self.costs.kernel_times(ops.take(first), rates)[place])


def _sum_kernels(kernels: KernelList, times: Array, kinds: NDArray[np.str_], host_s: float) -> TimeParts:
    """Return the parts of a model's time from the time and the kind of each of its kernels."""
    seconds = np.array(kernels.count, dtype=float) * (times + constant("sm", "gap_s"))
    total = float(seconds.sum())
    names, kind = np.unique(kinds, return_inverse=True)
    of_kinds = np.bincount(kind.reshape(-1), seconds, len(names)).tolist()
    by_kind = {str(name): part for name, part in zip(names, of_kinds, strict=True)}
    excess = float(seconds @ excess_of(kernels.op_types) / total) if total > 0.0 else 0.0
    return TimeParts(total, host_s, by_kind, excess)


def only_batch_of(model: UnmeasuredModel) -> int | None:
    """Return the fixed batch of a model, None where any batch is accepted."""
    path = Path(model.path or "")
    return read_fixed_batch(path) if path.is_file() else None


def kind_of(kernels: KernelList, precision: str) -> str:
    """Return the kind of a model, a key of `ErrorScales.model_factors`: models of a kind have similar errors.

    Kinds differ by the arithmetic, mostly of convolutions or of other products, on CUDA cores or on tensor cores, in
    TF32 or narrower types. Models in double precision were not measured.
    """
    ops, flops = kernels.ops, kernels.ops.flops * np.array(kernels.count, float)
    multiplied = float(flops[ops.is_in("matmul", "conv", "attention")].sum())
    part = "convolutions" if flops[ops.is_in("conv")].sum() > multiplied / 2 else "products"
    apart = {"float64": "double", "tfloat32": "tfloat32"}
    return f"{part} {apart.get(precision, 'tensor' if precision in TENSOR_TYPES else 'cores')}"


def trained_folder() -> Traversable:
    """Return the folder of the shipped regressors."""
    return datasets() / "cross_gpu"


@cache
def shipped_model() -> CrossGpuModel:
    """Return the shipped model; every file is checked against its hash in the provenance.

    Raises `InputError` when a file is missing or differs from the trained file.
    """
    _, files = read_trained_files(trained_folder())
    scales = ErrorScales(**json.loads(files.pop(_INTERVALS)))
    trees = {name.removesuffix(".onnx"): content for name, content in files.items()}
    return CrossGpuModel(CostModel(Forests(trees)), scales)


def read_trained_files(folder: Traversable) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """Return the provenance in a shipped folder, and by name each file whose hash it records.

    Raises `InputError` when a file is missing or differs from the trained file.
    """
    try:
        metadata: Mapping[str, Any] = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
        files = {name: (folder / name).read_bytes() for name in metadata["sha256"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the trained regressors cannot be read: {error}", "reinstall gpuprof") from None
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != metadata["sha256"][name]:
            raise InputError(f"{name} is not the file that was trained", "reinstall gpuprof")
    return metadata, files


#: Parts of a GPU or instance, as MPS serving systems cut it (ParvaGPU, iGniter: tenths), rising.
TENTHS = tuple(10.0 * tenth for tenth in range(1, 11))
#: Parts of a GPU in iGniter's steps of 2.5%.
_FORTIETHS = tuple(2.5 * part for part in range(1, 41))
MOST_BATCH = 256


class LatencyGrid:
    """Times of one model on one device, monotonic: never falling with the batch, never rising with the share.

    The regressors of small kernels are step functions, so raw times of larger batches are sometimes shorter, on half of
    a V100 by 15%. A time is at least that of every smaller batch under every larger share, among `TENTHS`.

    Parameters
    ----------
    kernels : KernelsByBatch
    device : Device
    model : CrossGpuModel
        The regressors.
    only : int, optional
        The model's fixed batch.
    busy : bool
        Whether the rest of the board works, too. Shares that run together then do no more than the whole board
        (`board_seconds`), whatever their number and batches, and none is quicker than beside an idle rest, as the
        regressors say of some kernels.
    """

    def __init__(
        self,
        kernels: KernelsByBatch,
        device: Device,
        model: CrossGpuModel,
        only: int | None = None,
        *,
        busy: bool = False,
    ) -> None:
        self._kernels, self._device, self._model, self._only, self._busy = kernels, device, model, only, busy
        self._idle = LatencyGrid(kernels, device, model, only) if busy else None
        self._board: Figure | None = None
        self._raw: dict[Share, dict[int, Figure]] = {}
        self._raised: dict[tuple[Share, int], Figure] = {}
        self._answers: dict[tuple[Share, int], Figure] = {}

    def at(self, share: Share, batch: int) -> Figure:
        """Return the time of a batch in ms, interpolated linearly between two batches of the grid.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        return self.series(share, (batch,))[0]

    def series(self, share: Share, batches: Sequence[int]) -> list[Figure]:
        """Return the times of several batches, as `at` does for each. Raises `InputError` as `at` does."""
        grids = {batch: self._kernels.grid(batch) for batch in batches if (share, batch) not in self._answers}
        if grids:
            ends = {end for grid in grids.values() for end in grid}
            self._predict((share, *_list_larger(share)), ends | set(self._list_smaller(max(ends))))
        idle = dict(zip(grids, self._idle.series(share, list(grids)), strict=True)) if self._idle else {}
        for batch, grid in grids.items():
            ends_ms = [self._raise(share, end) for end in grid]
            figure = ends_ms[0] if len(grid) == 1 else _interpolate(ends_ms, grid, batch)
            figure = self._conserve_work(share, batch, figure)
            self._answers[share, batch] = max(figure, idle.get(batch, figure), key=attrgetter("value"))
        return [self._answers[share, batch] for batch in batches]

    def board_seconds(self) -> Figure:
        """Return a lower bound of the whole board's time per batch item, in seconds, with its interval.

        Raises `InputError` as `at` does.
        """
        if self._board is None:
            # A smaller grid would give no bound.
            batches = self._kernels.list_grid(MOST_BATCH) if self._only is None else (self._only,)
            self._board = self._model.board_seconds(self._kernels, batches, self._device)
        return self._board

    def _conserve_work(self, share: Share, batch: int, figure: Figure) -> Figure:
        """Return the batch time of a share of a busy board, or of a MIG instance, which has its own SMs and memory.

        It is at least the board's least time for this batch, divided by the share's fraction.
        """
        if share.is_whole or not (self._busy or share.mig):
            return figure
        least = self.board_seconds().scale_by(1e3 * batch / self._device.fraction(share))
        low = max(figure.low or figure.value, least.low or least.value)
        return Figure(max(figure.value, least.value), figure.source, low, max(figure.upper(), least.upper()))

    def _list_smaller(self, batch: int) -> tuple[int, ...]:
        """Return the batches of the grid up to ``batch``."""
        return self._kernels.list_grid(batch) if batch > 1 else ()

    def _raise(self, share: Share, batch: int) -> Figure:
        """Return the time of a batch of the grid, raised to be monotonic, its interval in proportion."""
        if (share, batch) not in self._raised:
            raw, smaller = self._raw[share][batch], self._list_smaller(batch)
            shares = (share, *_list_larger(share))
            longest = max(self._raw[larger_share][size].value for larger_share in shares for size in (batch, *smaller))
            self._raised[share, batch] = raw.scale_by(longest / raw.value) if longest > raw.value > 0.0 else raw
        return self._raised[share, batch]

    def _predict(self, shares: Sequence[Share], batches: set[int]) -> None:
        """Predict the missing times, with those of more shares and batches that a plan is likely to ask for."""
        if all(batches <= self._raw.get(share, {}).keys() for share in shares):
            return
        if self._only is None and self._kernels.is_linear():  # no batch needs a graph of its own
            batches = batches.union(self._kernels.list_grid(MOST_BATCH))
        pct, mig = shares[0].sm_pct, shares[0].mig
        steps = next((steps for steps in (TENTHS[-1:], TENTHS, _FORTIETHS) if pct in steps), ())
        shares = tuple(dict.fromkeys([*shares, *(Share(step, mig) for step in steps)]))
        missing = [share for share in shares if not batches <= self._raw.get(share, {}).keys()]
        times = self._model.latencies(self._kernels, sorted(batches), self._device, missing, busy=self._busy)
        for share, of_share in times.items():
            self._raw.setdefault(share, {}).update(of_share)


def _list_larger(share: Share) -> list[Share]:
    """Return the larger shares of the same instance or device, and for an instance also the whole device."""
    larger = [Share(part, share.mig) for part in TENTHS if part > share.sm_pct]
    return larger if share.mig is None else [*larger, Share()]


def _interpolate(ends: Sequence[Figure], grid: Sequence[int], batch: int) -> Figure:
    (lower, upper), (low, high) = ends, grid
    value = lower.value + (upper.value - lower.value) * (batch - low) / (high - low)
    return lower.scale_by(value / lower.value) if lower.value > 0.0 else replace(lower, value=value)


class CrossGpuLatencies:
    """Times of models on GPUs; caches their kernels.

    ``graph_of``: returns the graph of a model at a batch size; ``busy``: whether `predict_series` assumes that the rest
    of the board is busy (`LatencyGrid`).
    """

    def __init__(self, execution: Execution, graph_of: Callable[[Any, int], ModelGraph], *, busy: bool = True) -> None:
        self._execution, self._graph_of, self._busy = execution, graph_of, busy
        self._kernels: dict[tuple[str, str], KernelsByBatch] = {}
        self._tables: dict[tuple[object, ...], LatencyGrid] = {}
        self._types: dict[str, str] = {}

    def predict(self, target: UnmeasuredModel, device: Device, batch: int, share: Share) -> Figure:
        """Return the time of a batch in ms on ``share`` of ``device`` while the rest of the board idles.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        return self._grid(target, device, busy=False).at(share, batch)

    def predict_series(
        self, target: UnmeasuredModel, device: Device, batches: Sequence[int], share: Share
    ) -> list[Figure]:
        """Return the times of several batches, with the rest of the board busy if ``busy``; raises as `predict`."""
        return self._grid(target, device, busy=self._busy).series(share, batches)

    def board_seconds(self, target: UnmeasuredModel, device: Device) -> Figure:
        """Return `LatencyGrid.board_seconds`. Raises `InputError` as `predict` does."""
        return self._grid(target, device, busy=True).board_seconds()

    def _grid(self, target: UnmeasuredModel, device: Device, *, busy: bool) -> LatencyGrid:
        # The key includes the power limit, on which times depend (`rates.sustained_part`): a board may be limited
        # further.
        key = (target.name, device.name, device.max_power_w, busy)
        if key not in self._tables:  # a placement asks thousands of times
            kernels, only = self.kernels_of(target, device), only_batch_of(target)
            self._tables[key] = LatencyGrid(kernels, device, shipped_model(), only, busy=busy)
        return self._tables[key]

    def kernels_of(self, target: UnmeasuredModel, device: Device) -> KernelsByBatch:
        """Return the kernels of a model in the precision of its arithmetic on ``device``.

        Raises `InputError` as `predict` does.
        """
        if target.name not in self._types:
            self._types[target.name] = type_of_weights(self._graph_of(target, only_batch_of(target) or 1))
        precision = self._execution.rate_name(device, self._types[target.name])
        kernels = self._kernels.get((target.name, precision))
        if kernels is None:
            kernels = KernelsByBatch(
                partial(self._graph_of, target), precision, self._execution.runtime, self._execution.host_us
            )
            self._kernels[target.name, precision] = kernels
        return kernels
