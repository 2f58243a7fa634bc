"""Measurements of models from the kernel database, and interpolation between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    COMPUTED,
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    MOST_VARIATION,
    FailedRun,
    Figure,
    TriedRuns,
    Workload,
    classify_source,
    is_unstable,
    mark_source,
)
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.runtime_variant import RuntimeVariant, rank_variants, variant_of
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import Sizes, describe_sizes, interpolate_sizes, sized_name, split_name
from gpuprof.errors import InputError
from gpuprof.estimators.conformal import (
    ENOUGH_MODELS,
    LEVEL,
    common_factor,
    interval_factor,
    left_out_residuals,
    quantile,
)
from gpuprof.estimators.constants import constant
from gpuprof.kernel_db.comparison import pool_variances, predict_next_run
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb

Floats = NDArray[np.float64]

CREQ_METRICS = {
    "max_occupancy": "max_occupancy_pct",
    "wavg_occupancy": "wavg_occupancy_pct",
    "wavg_sm_util": "wavg_sm_util_pct",
}
_FIGURES = ("client_sms", "memory_peak_bytes", "power_w", "l2_pct", "dram_pct", *CREQ_METRICS.values())


@dataclass(frozen=True, slots=True)
class Point:
    """A measured workload."""

    batch: int
    share: Share
    processes: int
    latency_ms: float  #: Mean, or the median where no mean is known.
    cv: float  #: Standard deviation over mean, 0 where unknown.
    #: Upper end of the 90% interval over the latency, less 1; 0 where unknown. The interval covers the runs of the
    #: workload, and of an unstable row its median, which disturbances change less than its mean.
    relative_error: float
    #: ``pause_factor``, ``pause_cv``: Time after a pause over that of a batch without a pause, and its own coefficient
    #: of variation; 1.0 and ``cv`` where not measured.
    pause_factor: float
    pause_cv: float
    figures: Mapping[str, float]  #: Other measured columns by name; unmeasured columns are absent.
    stable: bool = True  #: False where the row is marked unstable.
    computed: bool = False  #: True where a program computed the row, and nothing was measured.
    low_error: float | None = None  #: The latency over the interval's lower end, less 1; None: `relative_error`.

    def ends_of(self, value: float) -> tuple[float | None, float | None]:
        """Return the ends of a value's interval, scaled from the latency's; None where it is unknown."""
        low_error = self.relative_error if self.low_error is None else self.low_error
        if not (low_error or self.relative_error):
            return None, None
        return value / (1.0 + low_error), value * (1.0 + self.relative_error)

    def granted_fraction(self, device: Device) -> float:
        """Return the fraction of the device's compute units that the measured processes got together."""
        sms = self.figures.get("client_sms")
        if sms is None:
            return device.granted_fraction(self.share)
        return min(1.0, sms * self.processes / device.compute_units)

    def mark_source(self, source: str) -> str:
        """Return the source of a figure from this point, with the point's marks."""
        return mark_source(source, stable=self.stable, computed=self.computed)


@dataclass(slots=True)
class MeasuredModel:
    """A model of the database, at a single size of each free dimension except the batch."""

    name: str  #: Followed by the sizes, where the rows hold them: ``"bert[seq=64]"``.
    #: ``path``, ``sha256``, ``weight_bytes``: Properties of the model's file.
    path: str | None = None
    sha256: str | None = None
    weight_bytes: int | None = None
    #: ``points``, ``failures``: Measured points and failed runs, by device.
    points: dict[str, list[Point]] = field(default_factory=dict)
    failures: dict[str, list[FailedRun]] = field(default_factory=dict)
    superseded: int = 0  #: Number of older files of the same name.
    #: Device → execution variants measured there; the points are of the first alone.
    variants: dict[str, tuple[RuntimeVariant, ...]] = field(default_factory=dict)
    others: tuple[MeasuredModel, ...] = ()  #: The same file at other sizes.
    #: Points by batch, by device, share and processes, cached since plans query them tens of thousands of times.
    _series: dict[str, dict[tuple[Share | None, int | None], dict[int, Point]]] = field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def model(self) -> str:
        """Name without the sizes."""
        return split_name(self.name)[0]

    @property
    def sizes(self) -> Sizes:
        """Sizes in the name."""
        return split_name(self.name)[1]

    def has_run(self, device: str, workload: Workload) -> bool:
        """Return whether exactly this workload was measured on the device."""
        return workload.batch in self.read_series(device, workload.share, workload.processes)

    def read_series(self, device: str, share: Share | None = None, processes: int | None = None) -> Mapping[int, Point]:
        """Return the first measured point of each batch, if given only under a share and with a number of processes."""
        if device not in self._series:
            series = self._series[device] = {}
            for point in self.points.get(device, ()):
                for key in ((point.share, point.processes), (point.share, None), (None, None)):
                    series.setdefault(key, {}).setdefault(point.batch, point)
        return self._series[device].get((share, processes), {})

    def failed_on(self, device: str) -> list[FailedRun]:
        """Return the failed runs on a device at these sizes, or at other sizes of which none is larger."""
        failures = list(self.failures.get(device, ()))
        smaller = (peer for peer in self.others if _is_within(peer.sizes, self.sizes))
        return failures + [failed for peer in smaller for failed in peer.failures.get(device, ())]

    def tried_runs(self, name: str) -> TriedRuns:
        """Return the measured and the failed runs of the model, under the name ``name``."""
        failed = tuple(
            replace(record, workload=replace(record.workload, model=name))
            for device in sorted({device for record in (self, *self.others) for device in record.failures})
            for record in self.failed_on(device)
        )
        measured = frozenset(
            (device, Workload(name, point.batch, point.share, point.processes))
            for device, points in self.points.items()
            for point in points
        )
        return TriedRuns(failed, measured)


def _is_within(sizes: Sizes, limits: Sizes) -> bool:
    """Return whether all sizes are of the same dimensions and no larger."""
    limit = dict(limits)
    return (
        bool(sizes) and {name for name, _ in sizes} == set(limit) and all(size <= limit[name] for name, size in sizes)
    )


def read_measured(db: KernelDb) -> dict[str, MeasuredModel]:
    """Return every model of the database by name, at each of its measured sizes.

    Of several files with one name, the last measured file is used, whatever its sizes. Of several measurements of a
    workload, the last stable measurement is used, or the last if none is stable; measurements with wrong outputs under
    their share are ignored. Of several execution variants of a model on a device, one is used (`rank_variants`). A
    workload is recorded as failed unless it was measured later or in the same run.
    """
    # Run ids begin with the time of their start (`new_run_id`): the last row of a workload is the newest.
    rows = sorted(read_records(db, ModelRow), key=lambda row: row.run_id)
    latest = {row.model: row.model_sha256 for row in rows if row.model_sha256}
    superseded = {
        model: len({row.model_sha256 for row in rows if row.model == model and row.model_sha256}) - 1
        for model in latest
    }
    all_runs = db.read_table("runs", ["run_id", "collector"]).to_pylist()
    computed = {run["run_id"] for run in all_runs if run["collector"] == COMPUTED}  # whose rows a program computed
    current = [row for row in rows if row.model_sha256 in (None, latest.get(row.model))]
    models: dict[str, MeasuredModel] = {}
    for row in current:
        model = models.setdefault(_name(row), MeasuredModel(_name(row), superseded=superseded.get(row.model, 0)))
        model.path = row.model_path or model.path
        model.sha256 = row.model_sha256 or model.sha256
        model.weight_bytes = model.weight_bytes if row.weight_bytes is None else row.weight_bytes
    _keep_variants(models, [row for row in current if _latency(row) is not None and not row.error])
    chosen: dict[tuple[object, ...], ModelRow] = {}
    runs: dict[tuple[object, ...], list[ModelRow]] = {}
    failed: dict[tuple[object, ...], ModelRow] = {}
    for row in current:
        key = (_name(row), row.device, row.batch, row.sm_share_pct, row.mig_profile, row.processes)
        variants = models[_name(row)].variants.get(row.device, ())[:1]
        if row.error:
            by_another = variants and row.runtime not in (None, variants[0].runtime)
            if not by_another and (key not in chosen or chosen[key].run_id != row.run_id):
                failed[key] = row
        elif _latency(row) is not None and variant_of(row) in variants:
            failed.pop(key, None)
            runs.setdefault(key, []).append(row)
            if key not in chosen or row.stable or not chosen[key].stable:
                chosen[key] = row
    undisturbed = {workload: [_undisturbed(row) for row in repeats] for workload, repeats in runs.items()}
    variances = {
        device: pool_variances(times for workload, times in undisturbed.items() if workload[1] == device)
        for device in {row.device for row in chosen.values()}
    }
    slowdowns: dict[tuple[object, ...], list[float]] = {}
    for (_, device, _, *share), repeats in runs.items():
        slowdowns.setdefault((device, *share), []).extend(map(_slowdown, repeats))
    for workload, row in chosen.items():
        if workload not in failed:
            _, device, _, *share = workload
            most = quantile(slowdowns[device, *share], (1.0 + LEVEL) / 2.0) or 1.0
            least = 0.0 if row.cpu_wait_pct is None else constant("published", "run_spread") ** 2
            noise = _Noise(runs[workload], undisturbed[workload], max(least, variances[row.device]), most)
            models[_name(row)].points.setdefault(row.device, []).append(_point(row, noise, row.run_id in computed))
    for row in failed.values():
        run = Workload(_name(row), row.batch, Share(row.sm_share_pct, row.mig_profile), row.processes)
        model_failures = models[run.model].failures.setdefault(row.device, [])
        model_failures.append(FailedRun(row.device, run, str(row.error)))
    return models


def _keep_variants(models: Mapping[str, MeasuredModel], rows: Iterable[ModelRow]) -> None:
    """Record the execution variants of each model on each device, and keep the figures of the preferred variant."""
    by_workload: dict[tuple[str, str], list[RuntimeVariant]] = {}
    for row in rows:
        by_workload.setdefault((_name(row), row.device), []).append(variant_of(row))
    for (model, device), variants in by_workload.items():
        models[model].variants[device] = rank_variants(variants)


def shares_of(points: Iterable[Point]) -> tuple[Share, ...]:
    """Return the measured shares, sorted."""
    return tuple(sorted({point.share for point in points}, key=lambda share: (share.mig or "", share.sm_pct)))


def _name(row: ModelRow) -> str:
    return model_at_dims(row.model, row.dims)


def _latency(row: ModelRow) -> float | None:
    value = row.latency_mean_ms if row.latency_mean_ms is not None else row.latency_p50_ms
    return float(value) if value is not None and value > 0.0 else None


def _slowdown(row: ModelRow) -> float:
    """Return the factor by which other programs slowed a row: (time on a core + wait for a core) / time on a core."""
    if not row.cpu_wait_pct or not row.cpu_utilization_pct:
        return 1.0
    return 1.0 + row.cpu_wait_pct / row.cpu_utilization_pct


def _undisturbed(row: ModelRow) -> float:
    """Return the latency of a row without its waits for cores."""
    return (_latency(row) or 0.0) / _slowdown(row)


@dataclass(frozen=True, slots=True)
class _Noise:
    """Measured variation of a workload's latency, within and between runs."""

    runs: Sequence[ModelRow]  #: All runs of the workload.
    undisturbed_ms: Sequence[float]  #: Their latencies without waits for cores.
    variance: float  #: Between runs of a workload, of all workloads of the device (`pool_variances`).
    most: float  #: Slowdown that 95% of the device's runs under the share do not exceed.

    def interval(self) -> tuple[float, float]:
        """Return the 90% interval of the latency of another run, beside the same programs or none."""
        low_ms, high_ms = predict_next_run(self.undisturbed_ms, self.variance)
        return low_ms, high_ms * self.most


def _point(row: ModelRow, noise: _Noise, computed: bool) -> Point:
    """Return the workload of a measured row with its latency and noise."""
    latency = _latency(row) or 0.0
    cv = row.latency_std_ms / latency if row.latency_std_ms is not None else 0.0
    # 1.645 standard errors of the mean hold 90% of a normal distribution.
    error = 1.645 * cv / row.repeats**0.5 if row.repeats else 0.0
    if row.latency_p50_low_ms is not None and row.latency_p50_high_ms is not None and row.latency_p50_ms:
        error = max(error, (row.latency_p50_high_ms - row.latency_p50_low_ms) / (2.0 * row.latency_p50_ms))
    if row.stable is False:
        error = max(error, min(cv, MOST_VARIATION))
    latencies = [_latency(run) or 0.0 for run in noise.runs]
    next_low_ms, next_high_ms = noise.interval()
    low_ms = min(latency / (1.0 + error), *latencies, next_low_ms)
    high_ms = max(latency * (1.0 + error), *latencies, next_high_ms)
    medians = [run.latency_p50_ms for run in noise.runs if run.latency_p50_ms]
    if row.stable is False and medians:
        least_ms = predict_next_run(medians, noise.variance)[0] if len(medians) > 1 else medians[0] / (1.0 + error)
        low_ms = min(low_ms, *medians, least_ms)
    return Point(
        row.batch,
        Share(row.sm_share_pct, row.mig_profile),
        row.processes,
        latency,
        min(cv, MOST_VARIATION),
        high_ms / latency - 1.0,
        *_after_pause(row, latency, min(cv, MOST_VARIATION)),
        # A run that was only timed has none of the figures of kernels.
        {name: float(v) for run in (*noise.runs, row) for name in _FIGURES if (v := getattr(run, name)) is not None},
        row.stable is not False,
        computed,
        latency / low_ms - 1.0,
    )


def _after_pause(row: ModelRow, latency: float, cv: float) -> tuple[float, float]:
    paused, std = row.latency_paused_mean_ms, row.latency_paused_std_ms
    if not paused or std is None:
        return 1.0, cv
    # A shorter time after a pause is noise, and queueing models require a factor of at least 1.
    return max(1.0, paused / latency), min(std / paused, MOST_VARIATION)


def group_by_model(measured: Mapping[str, MeasuredModel]) -> dict[str, dict[Sizes, MeasuredModel]]:
    """Return the measurements by the models' names without sizes, then by sizes; ``()``: the rows have no sizes."""
    by_model: dict[str, dict[Sizes, MeasuredModel]] = {}
    for model in measured.values():
        by_model.setdefault(model.model, {})[model.sizes] = model
    return by_model


def read_at_sizes(path: str | None, sizes: Sizes, sha256: str | None = None) -> ModelGraph | None:
    """Return the graph of the file at ``sizes``, omitted dimensions at usual sizes; None where the file is gone or
    changed.

    Raises `InputError` when the model has no such dimension, or cannot be read at these sizes.
    """
    from gpuprof.graph.load import load_runnable, read_fixed_batch

    file = Path(path or "")
    if not file.is_file():
        return None
    graph = load_runnable(file, read_fixed_batch(file) or 1, dims=dict(sizes))
    return graph if sha256 is None or sha256 == graph.sha256 else None


def choose_sizes(name: str, by_sizes: Mapping[Sizes, MeasuredModel], sizes: Sizes) -> MeasuredModel:
    """Return the model at ``sizes``, which may omit dimensions.

    Omitted dimensions take their measured sizes if only one size was measured; else the usual sizes. Rows without sizes
    are of the usual sizes. Raises `InputError` when several sizes were measured and the choice is ambiguous, or the
    model has no such dimension. ``name``: of the model, without sizes; ``by_sizes``: its measurements; ``sizes``:
    requested sizes.
    """
    with_sizes = {model_sizes: model for model_sizes, model in by_sizes.items() if model_sizes}
    if not with_sizes and not sizes:
        return by_sizes[()]
    agreeing = {model_sizes: model for model_sizes, model in with_sizes.items() if set(sizes) <= set(model_sizes)}
    if len(agreeing) == 1 and () not in by_sizes:
        return _beside_others(next(iter(agreeing.values())), with_sizes.values())
    any_one = next(iter(by_sizes.values()))
    graph = read_at_sizes(any_one.path, sizes, any_one.sha256)
    if graph is None:
        return _without_file(name, by_sizes, sizes)
    if graph.guessed and agreeing:
        raise _ask(name, with_sizes)
    if () in by_sizes:
        usual = read_at_sizes(any_one.path, ())
        if usual is not None and usual.sizes not in with_sizes:
            with_sizes[usual.sizes] = replace(by_sizes[()], name=sized_name(name, usual.sizes))
    if graph.sizes in with_sizes:
        return _beside_others(with_sizes[graph.sizes], with_sizes.values())
    if agreeing and not sizes:
        raise _ask(name, with_sizes)
    return unmeasured_at(any_one, name, graph.sizes, with_sizes.values())


def unmeasured_at(like: MeasuredModel, name: str, sizes: Sizes, peers: Iterable[MeasuredModel] = ()) -> MeasuredModel:
    """Return a model at unmeasured sizes."""
    peers = tuple(peers)
    variants = {device: variant for peer in peers for device, variant in peer.variants.items()}
    return MeasuredModel(
        sized_name(name, sizes), like.path, like.sha256, like.weight_bytes, {}, {}, like.superseded, variants, peers
    )


def blend_measured(model: MeasuredModel, device: str) -> list[tuple[MeasuredModel, float]]:
    """Return the measured sizes around those of ``model`` on a device, with the weight of each; empty if outside."""
    if not model.others:
        return []
    measured = {peer.sizes: peer for peer in model.others if peer.points.get(device)}
    weights = interpolate_sizes(measured, model.sizes) or {}
    return [(measured[sizes], weight) for sizes, weight in weights.items() if weight > 0.0]


def _beside_others(model: MeasuredModel, peers: Iterable[MeasuredModel]) -> MeasuredModel:
    return replace(model, others=tuple(peer for peer in peers if peer is not model))


def _without_file(name: str, by_sizes: Mapping[Sizes, MeasuredModel], sizes: Sizes) -> MeasuredModel:
    """Return the model at ``sizes`` where its file, and so its dimensions, are missing."""
    with_sizes = {model_sizes: model for model_sizes, model in by_sizes.items() if model_sizes}
    if sizes in with_sizes:
        return _beside_others(with_sizes[sizes], with_sizes.values())
    if not sizes and () in by_sizes:
        return by_sizes[()]
    if not with_sizes:
        raise InputError(
            f"{name} was measured at sizes that the database does not say, and its ONNX file is not there",
            f"give the file, or measure it: gpuprof profile MODEL --dim {describe_sizes(sizes[:1])}",
        )
    names = {size: {dim for dim, _ in size} for size in with_sizes}
    if {dim for dim, _ in sizes} not in names.values():
        raise _ask(name, with_sizes)
    return unmeasured_at(next(iter(with_sizes.values())), name, sizes, with_sizes.values())


def _ask(name: str, known_sizes: Iterable[Sizes]) -> InputError:
    texts = list(map(describe_sizes, sorted(known_sizes)))
    dims = " ".join(f"--dim {dim}=SIZE" for dim in sorted({dim for sizes in known_sizes for dim, _ in sizes}))
    return InputError(f"{name} was measured at {' and at '.join(texts)}: say which is meant", dims)


class BatchCurve:
    """A piecewise linear function of the batch size.

    Time is nearly a constant plus a part in proportion to the batch, for which linear interpolation is exact; monotone
    data stay monotone. ``values``: batch size → measured value; at least one.

    Examples
    --------
    >>> curve = BatchCurve({1: 2.0, 8: 9.0})
    >>> curve.at(8), curve.at(4), curve.at(16)
    ((9.0, 'measured'), (5.0, 'interpolated'), None)
    >>> curve.extrapolate(16)
    Figure(value=17.0, source='extrapolated', low=9.0, high=18.0)
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        self.batches = tuple(sorted(values))
        self.values = tuple(values[batch] for batch in self.batches)

    def at(self, batch: int) -> tuple[float, str] | None:
        """Return the value with its source, measured or interpolated; None outside the measured range."""
        place = bisect_left(self.batches, batch)
        if place < len(self.batches) and self.batches[place] == batch:
            return self.values[place], MEASURED
        if place in (0, len(self.batches)):
            return None
        return self._line(place - 1, place, batch), INTERPOLATED

    def beyond(self, batch: int) -> float:
        """Return the value on the line through the nearest two points, at least that of every smaller batch."""
        if len(self.batches) == 1:
            return self.values[0] * max(1.0, batch / self.batches[0])
        if batch > self.batches[-1]:
            return max(self._line(-2, -1, batch), self.values[-1])
        return max(self._line(0, 1, batch), self.values[0] * batch / self.batches[0])

    def extrapolate(self, batch: int) -> Figure:
        """Return the figure beyond the measured batches: non-decreasing in the batch, and at most in proportion."""
        nearest = 0 if batch < self.batches[0] else -1
        ends = self.values[nearest], self.values[nearest] * batch / self.batches[nearest]
        return Figure(min(self.beyond(batch), max(ends)), EXTRAPOLATED, min(ends), max(ends))

    def left_out_errors(self) -> list[float]:
        """Return the relative error at each inner point, predicted from its neighbours."""
        return [
            abs(self._line(i - 1, i + 1, self.batches[i]) / self.values[i] - 1.0)
            for i in range(1, len(self.batches) - 1)
            if self.values[i] > 0.0
        ]

    def end_errors(self) -> list[float]:
        """Return the relative error at the largest batch, extrapolated from the two next smaller ones."""
        if len(self.batches) < 3 or self.values[-1] <= 0.0:
            return []
        predicted = BatchCurve(dict(zip(self.batches[:-1], self.values[:-1], strict=True))).beyond(self.batches[-1])
        return [abs(predicted / self.values[-1] - 1.0)]

    def _line(self, left: int, right: int, batch: int) -> float:
        x0, x1, y0, y1 = self.batches[left], self.batches[right], self.values[left], self.values[right]
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


def blend_figures(parts: Sequence[tuple[Figure, float]]) -> Figure:
    """Return the weighted mean of figures: its source is "interpolated" if all are measured or interpolated.

    Examples
    --------
    >>> blend_figures([(Figure(4.0, "measured"), 0.5), (Figure(8.0, "measured"), 0.5)])
    Figure(value=6.0, source='interpolated', low=None, high=None)
    """
    sources = {classify_source(figure.source) for figure, _ in parts}
    source = mark_source(
        INTERPOLATED if sources <= {MEASURED, INTERPOLATED, COMPUTED} else EXTRAPOLATED,
        stable=not any(is_unstable(figure.source) for figure, _ in parts),
        computed=COMPUTED in sources,
    )
    value = math.fsum(weight * figure.value for figure, weight in parts)
    if all(figure.low is None for figure, _ in parts):
        return Figure(value, source)
    low = math.fsum(weight * (figure.value if figure.low is None else figure.low) for figure, weight in parts)
    return Figure(value, source, low, math.fsum(weight * figure.upper() for figure, weight in parts))


def widen_by(figure: Figure, error: float) -> Figure:
    """Return the figure with its interval wider by a relative error at both ends."""
    low = figure.value if figure.low is None else figure.low
    return replace(figure, low=low / (1.0 + error), high=figure.upper() * (1.0 + error))


def widen_interval(figure: Figure, more: float) -> Figure:
    """Return the figure with the upper end raised by ``more``; a missing lower end is set at the same factor."""
    if not more:
        return figure
    high = figure.upper() + more
    return replace(figure, low=figure.value**2 / high if figure.low is None else figure.low, high=high)


def figure_of(model: MeasuredModel, device: Device, workload: Workload, column: str) -> Figure | None:
    """Return another measured quantity at the same share and processes, interpolated over batch and sizes."""
    if not model.points.get(device.name):
        each = [(figure_of(m, device, workload, column), weight) for m, weight in blend_measured(model, device.name)]
        found_all = [(figure, weight) for figure, weight in each if figure is not None]
        return blend_figures(found_all) if found_all and len(found_all) == len(each) else None
    series = model.read_series(device.name, workload.share, workload.processes)
    points = {batch: point.figures[column] for batch, point in series.items() if column in point.figures}
    reading = BatchCurve(points).at(workload.batch) if points else None
    return None if reading is None else Figure(*reading)


def estimate_bandwidth(
    model: MeasuredModel, device: Device, workload: Workload, column: str, alone_ms: float
) -> float | None:
    """Return a workload's percent of a bandwidth alone: measured, or by the traffic per request of the
    nearest point.
    """
    exact = figure_of(model, device, workload, column)
    if exact is not None:
        return exact.value
    points = [point for point in model.points.get(device.name, []) if column in point.figures]
    if not points:
        return None
    nearest = min(
        points, key=lambda p: (abs(math.log2(p.batch / workload.batch)), abs(p.share.sm_pct - workload.share.sm_pct))
    )
    each = nearest.figures[column] * nearest.latency_ms / (nearest.batch * nearest.processes)
    return min(100.0, each * workload.batch * workload.processes / alone_ms)


def behaviour_after_pause(model: MeasuredModel, device: Device, workload: Workload, cv: float) -> tuple[float, float]:
    """Return pause factor and variation of the nearest measured batch, preferably under the same share."""
    models = [model] if model.points.get(device.name) else model.others
    for share in (workload.share, None):
        near = [point for peer in models for point in peer.read_series(device.name, share).values()]
        if near:
            nearest = min(near, key=lambda point: abs(point.batch - workload.batch))
            return nearest.pause_factor, nearest.pause_cv
    return 1.0, cv


#: Least time of an execution in ms by batch and share, up to a factor; scales measured points to other workloads.
Shape = Callable[[int, Share], float]


class Surface:
    """Latency of a model with a given number of processes over batch size and share.

    ``points``: of one model, device and number of processes; at least one.
    """

    def __init__(self, points: Sequence[Point], device: Device) -> None:
        self.points = {(point.batch, point.share): point for point in points}
        self.curves = {
            share: BatchCurve({p.batch: p.latency_ms for p in points if p.share == share})
            for share in shares_of(points)
        }
        self._device = device
        self._fractions = {point.share: point.granted_fraction(device) for point in points}
        # The nearest of equally near points is the first.
        self._ranking = sorted(self.points.values(), key=lambda point: -point.batch)
        sizes = [(point.granted_fraction(device), point.batch) for point in self._ranking]
        self._doublings = np.log2(np.array(sizes, dtype=float))
        self._migs = np.array([point.share.mig or "" for point in self._ranking])

    def read_latencies(
        self, batches: Sequence[int], share: Share, shape: Callable[[], Shape | None]
    ) -> list[tuple[float, str, Point]]:
        """Return for each batch the latency, its source, and the nearest point.

        The source is measured, interpolated between batches or shares, else carried over from the nearest point;
        ``shape`` is called only in the last case.
        """
        nearest = self.find_nearest(batches, share)
        return [
            (*self._read_latency(batch, share, point, shape), point)
            for batch, point in zip(batches, nearest, strict=True)
        ]

    def _read_latency(
        self, batch: int, share: Share, nearest: Point, shape: Callable[[], Shape | None]
    ) -> tuple[float, str]:
        if share in self.curves and (reading := self.curves[share].at(batch)):
            return reading
        return self._between_shares(batch, share) or self._carry_over(batch, share, nearest, shape())

    def find_nearest(self, batches: Sequence[int], share: Share) -> list[Point]:
        """Return the measured point nearest to each batch; of equally near points, the one with the larger batch.

        The distance is the number of doublings of the batch and of the share between them, plus one for a share of
        another kind of partition.
        """
        part = math.log2(self._device.granted_fraction(share))
        sizes = np.array([[math.log2(batch)] for batch in batches])
        apart = np.abs(self._doublings[:, 0] - part) + np.abs(self._doublings[:, 1] - sizes)
        distances = apart + (self._migs != (share.mig or ""))
        # To nine decimals, since equal distances differ by rounding.
        return [self._ranking[place] for place in distances.round(9).argmin(axis=1)]

    def _between_shares(self, batch: int, share: Share) -> tuple[float, str] | None:
        """Interpolate between the measured shares around ``share``: log latency is nearly linear in log share."""
        points = [
            (self._fractions[curve_share], reading[0])
            for curve_share, curve in self.curves.items()
            if curve_share.mig == share.mig and (reading := curve.at(batch))
        ]
        fraction = self._device.granted_fraction(share)
        below = max((point for point in points if point[0] <= fraction), default=None)
        above = min((point for point in points if point[0] > fraction), default=None)
        if below is None or above is None:
            return None
        weight = math.log(fraction / below[0]) / math.log(above[0] / below[0])
        return math.exp((1 - weight) * math.log(below[1]) + weight * math.log(above[1])), INTERPOLATED

    def _carry_over(self, batch: int, share: Share, point: Point, shape: Shape | None) -> tuple[float, str]:
        if shape is not None and (nearest_shape := shape(point.batch, point.share)) > 0.0:  # 0: no op has work to count
            factor = shape(batch, share) / nearest_shape
            return point.latency_ms * factor, EXTRAPOLATED
        curve = self.curves[point.share]
        reading = curve.at(batch)
        value = reading[0] if reading else curve.beyond(batch)
        parts = point.granted_fraction(self._device) / self._device.granted_fraction(share)
        return value * max(1.0, parts), EXTRAPOLATED


class LatencyEnvelope:
    """Bounds of a model's time on one device from its measurements there.

    A batch takes no less time with more requests, more processes or fewer compute units, and at most in proportion to
    each of them. The tightest bound over all measured points counts. ``points``: of one model on one device; at least
    one.
    """

    def __init__(self, points: Sequence[Point], device: Device) -> None:
        self._device = device
        self._batches = np.array([point.batch for point in points], dtype=float)
        self._processes = np.array([point.processes for point in points], dtype=float)
        self._parts = np.array([point.granted_fraction(device) for point in points], dtype=float)
        self._latencies = np.array([point.latency_ms for point in points], dtype=float)

    def bounds(self, batches: Sequence[int], share: Share, processes: int) -> tuple[Floats, Floats]:
        """Return the least and the largest times of batches in ms, without widening.

        Where measurements contradict the assumptions, the lower bound may exceed the upper.
        """
        part = self._device.granted_fraction(share)
        more = np.array(batches)[:, None] / self._batches, self._parts / part, processes / self._processes
        least, most = self._latencies, self._latencies
        for ratio in more:
            least, most = least * np.minimum(1.0, ratio), most * np.maximum(1.0, ratio)
        return least.max(axis=1), most.min(axis=1)

    def intervals(self, batches: Sequence[int], share: Share, processes: int) -> list[tuple[float, float]]:
        """Return the 90% intervals of the times of batches in ms, by the slack of published models."""
        slack = constant("published", "extrapolation_slack")
        least, most = np.sort(self.bounds(batches, share, processes), axis=0)
        return list(zip((least / slack).tolist(), (most * slack).tolist(), strict=True))


class Calibration:
    """Errors of interpolation, extrapolation and predictions on a device, fitted to its measurements.

    ``surfaces``: measurements with one process by model name. ``shape_of``: returns a model's roofline in ms by batch
    size and share, None without a graph; called only to scale a roofline, because it reads the file.
    """

    def __init__(self, surfaces: Mapping[str, Surface], shape_of: Callable[[str], Shape | None]) -> None:
        self._surfaces = surfaces
        self._shape_of = shape_of

    def scale_prediction(self, least_ms: float, source: str) -> Figure:
        """Return the figure for a roofline of ``least_ms``, scaled by the device's ratio of measurement to roofline.

        From four measured models on, the interval is conformal: each model's ratio is compared with that of the others.
        With fewer models it is the spread of published measurements on two GPUs, and without models their range, which
        guarantees nothing on other kinds of devices.
        """
        if not self.ratios:
            low, high = (constant("published", f"roofline_{end}") for end in ("low", "high"))
            return Figure(least_ms, source, least_ms * low, least_ms * high)
        return self._scale_by_models(least_ms, source, constant("published", "roofline_spread"))

    def scale_figure(self, figure: Figure) -> Figure:
        """Return a prediction learned on other devices, scaled like a roofline by the models measured
        on this device.
        """
        if not self.ratios or figure.value <= 0.0:
            return figure
        return self._scale_by_models(figure.value, figure.source, figure.upper() / figure.value)

    def _scale_by_models(self, predicted_ms: float, source: str, spread: float) -> Figure:
        value = predicted_ms * common_factor(self.ratios)
        if len(self.ratios) >= ENOUGH_MODELS:
            spread = interval_factor(left_out_residuals(self.ratios)) or 1.0
        return Figure(value, source, value / spread, value * spread)

    @cached_property
    def interpolation_error(self) -> float:
        """Half-width of the 90% interval of interpolated values, relative to the value, for exact measurements."""
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.left_out_errors()]
        return _error_of(errors, "interpolation_error")

    def carried_error(self, doublings: float) -> float:
        """Return the relative half-width of the 90% interval of figures carried over from other sizes."""
        return self._beyond * max(1.0, doublings)

    @cached_property
    def _beyond(self) -> float:
        errors = [e for s in self._surfaces.values() for c in s.curves.values() for e in c.end_errors()]
        return _error_of(errors, "extrapolation_error")

    @cached_property
    def ratios(self) -> dict[str, list[float]]:
        """Ratios of measured to roofline time by model name, without models whose roofline is zero."""
        shapes = {name: self._shape_of(name) for name in self._surfaces}
        ratios = {
            name: [
                point.latency_ms / least
                for point in self._surfaces[name].points.values()
                if (least := shape(point.batch, point.share)) > 0.0
            ]
            for name, shape in shapes.items()
            if shape is not None
        }
        return {name: values for name, values in ratios.items() if values}


def _error_of(errors: Sequence[float], published: str) -> float:
    """Return the quantile of a device's errors, at least 1%; with fewer than five errors, the published quantile."""
    error = quantile(errors, LEVEL) if len(errors) >= 5 else None
    return max(0.01, constant("published", published) if error is None else error)
