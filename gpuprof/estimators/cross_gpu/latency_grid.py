"""Times of models on GPUs by share and batch; the times that a plan will need are predicted together and cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gpuprof.estimators.cross_gpu.measured_ops import TimedOp, adapt_model
from gpuprof.estimators.cross_gpu.worse_devices import WholeTimes

#: Numbers of queries that identify a plan: batches under a share, and shares of an instance or of the whole device. A
#: plan will ask for more of them.
_MANY_BATCHES, _MANY_SHARES = 2, 8
#: Batches and percentages that plans choose from: finer steps on the whole device than on its instances.
_MOST_BATCH = 256
_STEP, _INSTANCE_STEP = 2.5, 5.0
#: Percentages that any smaller share must not beat; few, since each is predicted beside the queried share.
_COMPARED_SHARES = (10.0, 25.0, 50.0, 75.0, 100.0)


class LatencyGrid:
    """Times of one model on one device, monotonic: never falling with the batch, never rising with the share.

    The regressors of small kernels are step functions, so that raw times here and there fall by some percent: on half
    of a V100 by 15%. A share is compared with those of `_COMPARED_SHARES`, a share of an instance with the whole
    device, too. Nor is a device slower than a device of the catalogue that is better in nothing.

    Parameters
    ----------
    kernels : KernelsByBatch
    device : Device
    model : CrossGpuModel
        Adapted to the measurements of the device, where there are any.
    whole : WholeTimes, optional
        Times on other devices; None: they are not compared.
    busy : bool
        Whether the rest of the board works, too. Shares that run together then do no more than the whole board
        (`board_seconds`), whatever their number and batches.
    """

    def __init__(
        self,
        kernels: KernelsByBatch,
        device: Device,
        model: CrossGpuModel,
        whole: WholeTimes | None = None,
        *,
        busy: bool = False,
    ) -> None:
        self._kernels, self._device, self._model, self._whole = kernels, device, model, whole
        self._busy = busy
        self._board: Figure | None = None
        self._known: dict[Share, dict[int, Figure]] = {}  # no slower than worse devices, at batches of the grid
        self._told: dict[Share, dict[int, Figure]] = {}
        self._raised: dict[Share, dict[int, Figure]] = {}  # the same, no quicker than smaller batches
        self._read: dict[Share, dict[int, Figure]] = {}  # at any batch; each share is compared with several others
        self._asked: dict[Share, int] = {}
        self._factors: dict[int, float] = {}  # factors of times under any share, by batch

    def at(self, share: Share, batch: int) -> Figure:
        """Return the time of a batch in ms, interpolated linearly between two batches of the grid.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        return self.series(share, (batch,))[0]

    def series(self, share: Share, batches: Sequence[int]) -> list[Figure]:
        """Return the times of several batches, as `at` does for each. Raises `InputError` as `at` does."""
        told = self._told.setdefault(share, {})
        shares = (share, *_list_larger(share))
        asked = [one for one in batches if one not in told]
        grids = {one: self._kernels.grid(one) for one in asked}
        needed = {one for grid in grids.values() for one in grid}
        needed |= set(self._list_smaller(max(needed, default=1)))
        known_to_all = set.intersection(*(set(self._known.get(one, {})) for one in shares))
        if missing := sorted(needed - known_to_all):
            self._predict(shares, missing, len(asked))
        for batch, grid in grids.items():
            each = [self._read_time(one, grid, batch) for one in shares]
            told[batch] = self._conserve_work(share, batch, _scale_to(each[0], max(one.value for one in each)))
        return [told[one] for one in batches]

    def board_seconds(self) -> Figure:
        """Return the least time of the whole board per item of a batch, in seconds, with its interval.

        Raises `InputError` as `at` does.
        """
        if self._board is None:
            batches = self._kernels.list_grid(_MOST_BATCH)  # a smaller grid would give no bound
            least = self._model.board_seconds(self._kernels, batches, self._device)
            if self._whole is not None:
                whole = self._model.latencies(self._kernels, batches, self._device, [Share()])
                self._compare_devices({batch: figure.value / 1e3 for (_, batch), figure in whole.items()})
                least = least.scale_by(min(1.0, *(self._factors[batch] for batch in batches)))
            self._board = least
        return self._board

    def _conserve_work(self, share: Share, batch: int, figure: Figure) -> Figure:
        """Return the time of a share beside a busy board: at least the board's time for the work over the fraction."""
        if not self._busy or share.is_whole:
            return figure
        least = self.board_seconds().scale_by(1e3 * batch / self._device.fraction(share))
        low = max(figure.low or figure.value, least.low or least.value)
        return Figure(max(figure.value, least.value), figure.source, low, max(figure.upper(), least.upper()))

    def _read_time(self, share: Share, grid: Sequence[int], batch: int) -> Figure:
        """Return the time of a batch of the grid, or interpolated between two, from the share's own times."""
        read = self._read.setdefault(share, {})
        if batch not in read:
            ends = [self._raise(share, one) for one in grid]
            read[batch] = ends[0] if len(grid) == 1 else _interpolate(ends, grid, batch)
        return read[batch]

    def _list_smaller(self, batch: int) -> tuple[int, ...]:
        """Return the batches of the grid up to ``batch``."""
        return self._kernels.list_grid(batch) if batch > 1 else ()

    def _raise(self, share: Share, batch: int) -> Figure:
        """Return the time of a batch of the grid, at least that of all smaller batches."""
        raised = self._raised.setdefault(share, {})
        if batch not in raised:
            known = self._known[share]
            longest = max((known[one].value for one in self._list_smaller(batch)), default=0.0)
            raised[batch] = _scale_to(known[batch], longest)
        return raised[batch]

    def _predict(self, compared: Sequence[Share], missing: Sequence[int], asked: int) -> None:
        """Predict missing times of ``compared``, the queried share first, and for a plan those of its later queries."""
        share = compared[0]
        self._asked[share] = self._asked.get(share, 0) + asked
        shares, batches = list(compared), tuple(missing)
        many = sum(one.mig == share.mig for one in self._asked) >= _MANY_SHARES
        if many or self._asked[share] >= _MANY_BATCHES:
            batches = tuple(sorted({*batches, *self._kernels.list_grid(max(*missing, _MOST_BATCH))}))
        if many:
            shares = list(dict.fromkeys((*compared, *_list_shares(share.mig))))
        wanted = [one for one in shares if not self._known.get(one, {}).keys() >= set(batches)]
        compared_yet = self._factors.keys() >= set(batches)
        if not compared_yet and Share() not in wanted:
            wanted.append(Share())
        found = self._model.latencies(self._kernels, batches, self._device, wanted, busy=self._busy)
        if not compared_yet:
            self._compare_devices({batch: found[Share(), batch].value / 1e3 for batch in batches})
        for (one, batch), figure in found.items():
            factor = self._factors[batch]
            self._known.setdefault(one, {})[batch] = figure.scale_by(factor) if factor < 1.0 else figure

    def _compare_devices(self, whole_s: Mapping[int, float]) -> None:
        """Record the factors of times so that no worse device is quicker, from the times on the whole device."""
        factors = {} if self._whole is None else self._whole.find_factors(self._device, whole_s)
        self._factors |= {batch: factors.get(batch, 1.0) for batch in whole_s}


def _scale_to(figure: Figure, longest: float) -> Figure:
    """Return a time, raised to ``longest`` where longer, with its interval in proportion."""
    return figure.scale_by(longest / figure.value) if longest > figure.value > 0.0 else figure


def _list_larger(share: Share) -> list[Share]:
    """Return larger parts of the same instance or device, and of an instance the whole device."""
    larger = [Share(part, share.mig) for part in _COMPARED_SHARES if part > share.sm_pct]
    return larger if share.mig is None else [*larger, Share()]


def _interpolate(ends: Sequence[Figure], grid: Sequence[int], batch: int) -> Figure:
    (one, two), (low, high) = ends, grid
    value = one.value + (two.value - one.value) * (batch - low) / (high - low)
    return one.scale_by(value / one.value) if one.value > 0.0 else replace(one, value=value)


def _list_shares(mig: str | None) -> list[Share]:
    step = _STEP if mig is None else _INSTANCE_STEP
    return [Share(step * number, mig) for number in range(1, round(100.0 / step) + 1)]


class CrossGpuLatencies:
    """Times of models on GPUs; caches their kernels.

    ``graph_of``: model and batch → its graph; ``timed_ops``: device → ops measured on it; ``busy``: whether
    `predict_series` gives the times of shares beside a busy board (`LatencyGrid`).
    """

    def __init__(
        self,
        execution: Execution,
        graph_of: Callable[[Any, int], ModelGraph],
        timed_ops: Callable[[Device], Sequence[TimedOp]] = lambda device: (),
        *,
        busy: bool = True,
    ) -> None:
        self._execution, self._graph_of, self._timed_ops, self._busy = execution, graph_of, timed_ops, busy
        self._kernels: dict[tuple[str, str], KernelsByBatch] = {}
        self._tables: dict[tuple[object, ...], LatencyGrid] = {}
        self._whole: dict[tuple[str, str], WholeTimes] = {}
        self._types: dict[str, str] = {}

    def predict(self, known: UnmeasuredModel, device: Device, batch: int, share: Share) -> Figure:
        """Return the time of a batch in ms on ``share`` of ``device`` while the rest of the board idles.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        return self._grid(known, device, busy=False).at(share, batch)

    def predict_series(
        self, known: UnmeasuredModel, device: Device, batches: Sequence[int], share: Share
    ) -> list[Figure]:
        """Return the times of several batches, beside a busy board where ``busy``. Raises as `predict` does."""
        return self._grid(known, device, busy=self._busy).series(share, batches)

    def board_seconds(self, known: UnmeasuredModel, device: Device) -> Figure:
        """Return `LatencyGrid.board_seconds`. Raises `InputError` as `predict` does."""
        return self._grid(known, device, busy=True).board_seconds()

    def _grid(self, known: UnmeasuredModel, device: Device, *, busy: bool) -> LatencyGrid:
        # The key includes the power limit, on which times depend (`rates.sustained_part`): a board may be limited
        # further.
        key = (known.name, device.name, device.max_power_w, busy)
        if key not in self._tables:  # a placement asks thousands of times
            timed, kernels = self._timed_ops(device), self.kernels_of(known, device)
            whole = self._whole.setdefault((known.name, kernels.precision), WholeTimes(kernels, shipped_model()))
            model = adapt_model(shipped_model(), device, timed)
            self._tables[key] = LatencyGrid(kernels, device, model, None if timed else whole, busy=busy)
        return self._tables[key]

    def kernels_of(self, known: UnmeasuredModel, device: Device) -> KernelsByBatch:
        """Return the kernels of a model in the precision of its arithmetic on ``device``.

        Raises `InputError` as `predict` does.
        """
        if known.name not in self._types:
            self._types[known.name] = type_of_weights(self._graph_of(known, only_batch_of(known) or 1))
        precision = self._execution.rate_name(device, self._types[known.name])
        kernels = self._kernels.get((known.name, precision))
        if kernels is None:
            kernels = KernelsByBatch(partial(self._graph_of, known), precision, self._execution.runtime)
            self._kernels[known.name, precision] = kernels
        return kernels
