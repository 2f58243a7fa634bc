"""Measurements of models from the kernel database, for lookup and interpolation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import COMPUTED, MOST_VARIATION, FailedRun, TriedRuns, Workload, mark_source
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.runtime_variant import RuntimeVariant, rank_variants, variant_of
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import Sizes, describe_sizes, interpolate_sizes, sized_name, split_name
from gpuprof.errors import InputError
from gpuprof.kernel_db.comparison import pool_variances, predict_next_run
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb

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
        """Return the ends of the interval of a value in proportion to the latency; None where it is unknown."""
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
    #: Batch, share and processes of the points, by device, cached since plans query them tens of thousands of times.
    _runs: dict[str, frozenset[tuple[int, Share, int]]] = field(default_factory=dict, init=False, compare=False)

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
        if device not in self._runs:
            self._runs[device] = frozenset((p.batch, p.share, p.processes) for p in self.points.get(device, ()))
        return (workload.batch, workload.share, workload.processes) in self._runs[device]

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
    computed = _list_computed_runs(db)
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
    latencies = {workload: [_latency(row) or 0.0 for row in repeats] for workload, repeats in runs.items()}
    variances = {
        device: pool_variances(times for workload, times in latencies.items() if workload[1] == device)
        for device in {row.device for row in chosen.values()}
    }
    for workload, row in chosen.items():
        if workload not in failed:
            computes = row.run_id in computed
            point = _point(row, runs[workload], latencies[workload], variances[row.device], computes)
            models[_name(row)].points.setdefault(row.device, []).append(point)
    for row in failed.values():
        run = Workload(_name(row), row.batch, Share(row.sm_share_pct, row.mig_profile), row.processes)
        model_failures = models[run.model].failures.setdefault(row.device, [])
        model_failures.append(FailedRun(row.device, run, str(row.error)))
    return models


def _keep_variants(models: Mapping[str, MeasuredModel], rows: Iterable[ModelRow]) -> None:
    """Record the execution variants of each model on each device, the variant whose figures count first."""
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


def _list_computed_runs(db: KernelDb) -> frozenset[str]:
    """Return the runs whose rows a program computed."""
    runs = db.read_table("runs", ["run_id", "collector"]).to_pylist()
    return frozenset(run["run_id"] for run in runs if run["collector"] == COMPUTED)


def _point(
    row: ModelRow, runs: Sequence[ModelRow], latencies: Sequence[float], variance: float, computed: bool
) -> Point:
    """Return the point of a row.

    ``runs``, ``latencies``: rows of the workload, and their latencies; ``variance``: of `pool_variances`.
    """
    latency = _latency(row) or 0.0
    cv = row.latency_std_ms / latency if row.latency_std_ms is not None else 0.0
    # 1.645 standard errors of the mean hold 90% of a normal distribution.
    error = 1.645 * cv / row.repeats**0.5 if row.repeats else 0.0
    if row.latency_p50_low_ms is not None and row.latency_p50_high_ms is not None and row.latency_p50_ms:
        error = max(error, (row.latency_p50_high_ms - row.latency_p50_low_ms) / (2.0 * row.latency_p50_ms))
    if row.stable is False:
        error = max(error, min(cv, MOST_VARIATION))
    low_ms, high_ms = latency / (1.0 + error), latency * (1.0 + error)
    if len(latencies) > 1:
        next_low_ms, next_high_ms = predict_next_run(latencies, variance)
        low_ms, high_ms = min(low_ms, *latencies, next_low_ms), max(high_ms, *latencies, next_high_ms)
    medians = [run.latency_p50_ms for run in runs if run.latency_p50_ms]
    if row.stable is False and medians:
        least_ms = predict_next_run(medians, variance)[0] if len(medians) > 1 else medians[0] / (1.0 + error)
        low_ms = min(low_ms, *medians, least_ms)
    return Point(
        row.batch,
        Share(row.sm_share_pct, row.mig_profile),
        row.processes,
        latency,
        min(cv, MOST_VARIATION),
        high_ms / latency - 1.0,
        *_after_pause(row, latency, min(cv, MOST_VARIATION)),
        {name: float(value) for name in _FIGURES if (value := getattr(row, name)) is not None},
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
    """Return the measured sizes on a device around those of ``model``, with the weight of each; empty outside."""
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
