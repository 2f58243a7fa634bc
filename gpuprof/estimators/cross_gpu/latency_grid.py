"""Times of models on GPUs by share and batch, cached for the thousands of questions of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel, UnmeasuredModel, only_batch_of, shipped_model
from gpuprof.estimators.cross_gpu.execution import Execution, type_of_weights
from gpuprof.estimators.cross_gpu.kernels_by_batch import KernelsByBatch

#: Parts of a GPU or instance, as MPS serving systems cut it (ParvaGPU, iGniter: tenths), rising.
TENTHS = tuple(10.0 * tenth for tenth in range(1, 11))
MOST_BATCH = 256


class LatencyGrid:
    """Times of one model on one device, monotonic: never falling with the batch, never rising with the share.

    The regressors of small kernels are step functions, so that raw times here and there fall by some percent: on half
    of a V100 by 15%. A time is at least that of every smaller batch under every larger share, among `TENTHS`.

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
        (`board_seconds`), whatever their number and batches.
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
            for compared in (share, *_list_larger(share)):
                self._predict(compared, ends | set(self._list_smaller(max(ends))))
        for batch, grid in grids.items():
            ends_ms = [self._raise(share, end) for end in grid]
            figure = ends_ms[0] if len(grid) == 1 else _interpolate(ends_ms, grid, batch)
            self._answers[share, batch] = self._conserve_work(share, batch, figure)
        return [self._answers[share, batch] for batch in batches]

    def board_seconds(self) -> Figure:
        """Return the least time of the whole board per item of a batch, in seconds, with its interval.

        Raises `InputError` as `at` does.
        """
        if self._board is None:
            # A smaller grid would give no bound.
            batches = self._kernels.list_grid(MOST_BATCH) if self._only is None else (self._only,)
            self._board = self._model.board_seconds(self._kernels, batches, self._device)
        return self._board

    def _conserve_work(self, share: Share, batch: int, figure: Figure) -> Figure:
        """Return the time of a share beside a busy board: at least the board's time for the work over the fraction."""
        if not self._busy or share.is_whole:
            return figure
        least = self.board_seconds().scale_by(1e3 * batch / self._device.fraction(share))
        low = max(figure.low or figure.value, least.low or least.value)
        return Figure(max(figure.value, least.value), figure.source, low, max(figure.upper(), least.upper()))

    def _list_smaller(self, batch: int) -> tuple[int, ...]:
        """Return the batches of the grid up to ``batch``."""
        return self._kernels.list_grid(batch) if batch > 1 else ()

    def _raise(self, share: Share, batch: int) -> Figure:
        """Return the time of a batch of the grid, with its interval in proportion where it is raised."""
        if (share, batch) not in self._raised:
            raw, smaller = self._raw[share][batch], self._list_smaller(batch)
            shares = (share, *_list_larger(share))
            longest = max(self._raw[larger_share][size].value for larger_share in shares for size in (batch, *smaller))
            self._raised[share, batch] = raw.scale_by(longest / raw.value) if longest > raw.value > 0.0 else raw
        return self._raised[share, batch]

    def _predict(self, share: Share, batches: set[int]) -> None:
        """Predict the missing times under a share."""
        times = self._raw.setdefault(share, {})
        if missing := sorted(batches - times.keys()):
            times |= self._model.latencies(self._kernels, missing, self._device, share, busy=self._busy)


def _list_larger(share: Share) -> list[Share]:
    """Return larger parts of the same instance or device, and of an instance the whole device."""
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

    def __init__(
        self,
        execution: Execution,
        graph_of: Callable[[Any, int], ModelGraph],
        *,
        busy: bool = True,
    ) -> None:
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
