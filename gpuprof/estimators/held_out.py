"""Errors of estimates: regressors without an architecture or batch size, any estimator without a model or device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.compute as pc
from joblib import Parallel, delayed

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.plural import count_of
from gpuprof.errors import GpuprofError, InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.conformal import common_factor, interval_factor
from gpuprof.estimators.learned.learned import ALLOCATION, STACK, STACKED, LearnedModel, fit, predict_requirement
from gpuprof.estimators.learned.training_set import (
    MREQ,
    NODE_NS,
    Array,
    ModelCase,
    OpTimes,
    TrainingSet,
    graph_facts,
    leave_out_architecture,
    roofline_ns,
)
from gpuprof.estimators.measured.measured import BatchCurve, MeasuredModel, read_measured
from gpuprof.estimators.memory import peak_activation_bytes
from gpuprof.kernel_db.schema import TABLES
from gpuprof.kernel_db.store import KernelDb
from gpuprof.machine.cgroup import own_cores

ROOFLINE = "roofline"
#: `estimate`'s source on a device with measured models but no trained regressors.
SCALED = "roofline, scaled"
INTERPOLATION = "interpolation"
CONSTANT = "mean of the others"
UNSEEN = "architecture"
NEW_BATCH = "batch size"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure, measured and predicted."""

    setting: str  #: Held-out unit.
    quantity: str  #: ``"op time"``, ``"latency"``, ``"memory"`` or ``"Creq "`` and its metric.
    #: ``"stack"``, a constituent, ``"roofline"``, the roofline scaled, ``"interpolation"``, or `CONSTANT`.
    predictor: str
    model: str
    batch: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Absolute relative error."""
        return abs(self.predicted / self.measured - 1.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of a predictor for a quantity in a setting."""

    setting: str
    quantity: str
    predictor: str
    architecture: str  #: Empty for all architectures together.
    count: int
    #: ``mean_pct``, ``median_pct``, ``p95_pct``: Statistics of the absolute relative error.
    mean_pct: float
    median_pct: float
    p95_pct: float
    #: Part of the measured figures inside the 90% interval; None where the predictor has none.
    coverage_pct: float | None = None

    @classmethod
    def of_errors(
        cls, setting: str, quantity: str, predictor: str, architecture: str, pct: Array, coverage_pct: float | None
    ) -> Summary:
        """Return the summary of absolute relative errors in percent, an array of shape (N,)."""
        statistics = float(pct.mean()), float(np.median(pct)), float(np.percentile(pct, 95))
        return cls(setting, quantity, predictor, architecture, len(pct), *statistics, coverage_pct)


def leave_one_architecture_out(
    data: TrainingSet, names: Sequence[str] = STACKED, progress: Callable[[str], None] = lambda _: None
) -> list[Prediction]:
    """Return predictions for every architecture by regressors fitted without it, in parallel on all cores.

    Raises `InputError` with fewer than two architectures.
    """
    if len(data.architectures) < 2:
        raise InputError(
            f"leaving one architecture out needs two but there is {len(data.architectures)}",
            "profile models of another one",
        )
    predictions: list[Prediction] = []
    rates, sources = dict(data.device.flops_per_s), dict(data.device.sources)  # views of mappings cannot be pickled
    picklable = replace(data, device=replace(data.device, flops_per_s=rates, sources=sources))
    tasks = (delayed(_predict_left_out)(picklable, name, tuple(names)) for name in data.architectures)
    parts = Parallel(n_jobs=len(own_cores()), return_as="generator")(tasks)
    for architecture, part in zip(data.architectures, parts, strict=True):
        predictions += part
        progress(architecture)
    return predictions


def _predict_left_out(data: TrainingSet, architecture: str, names: Sequence[str]) -> list[Prediction]:
    rest = leave_out_architecture(data, architecture)
    model = fit(rest, names)
    predictions = [] if data.ops is None else _of_ops(data.ops, model, architecture)
    ratios: dict[str, list[float]] = {}
    for case in rest.cases:
        ratios.setdefault(case.architecture, []).append(case.latency_ms / case.roofline_ms)
    factor = common_factor(ratios)
    for case in (case for case in data.cases if case.architecture == architecture):
        predictions += [*_of_case(case, model), *_of_requirements(case, model, rest)]
        scaled_ms = factor * case.roofline_ms
        predictions.append(_prediction(UNSEEN, "latency", SCALED, case, case.latency_ms, scaled_ms))
    return predictions


def predict_left_out_batches(data: TrainingSet) -> list[Prediction]:
    """Return predictions of every inner batch size of every model from its other batch sizes."""
    predictions: list[Prediction] = []
    for case in data.cases:
        siblings = [c for c in data.cases if (c.graph.name, c.share) == (case.graph.name, case.share) and c is not case]
        for quantity, figure in (("latency", "latency_ms"), ("memory", "memory_bytes")):
            points = {sibling.graph.batch: value for sibling in siblings if (value := getattr(sibling, figure))}
            between = BatchCurve(points).at(case.graph.batch) if points else None
            if between is not None and (measured := getattr(case, figure)):
                predictions.append(_prediction(NEW_BATCH, quantity, INTERPOLATION, case, measured, between[0]))
    return predictions


def summarise_errors(predictions: Iterable[Prediction], by_architecture: bool = False) -> list[Summary]:
    """Return the errors by setting, quantity and predictor, with the coverage of the intervals of the predictors in
    use.

    The interval of an architecture comes from the residuals of the other architectures, each predicted by a fit without
    it.
    """
    groups: dict[tuple[str, str, str, str], list[Prediction]] = {}
    for prediction in predictions:
        which = prediction.model if by_architecture else ""
        groups.setdefault((prediction.setting, prediction.quantity, prediction.predictor, which), []).append(prediction)
    return [_summary(*key, members) for key, members in groups.items()]


def coverage(predictions: Sequence[Prediction]) -> float | None:
    """Return the fraction of measured figures inside intervals made from the other architectures' residuals."""
    residuals: dict[str, list[float]] = {}
    for prediction in predictions:
        residuals.setdefault(prediction.model, []).append(math.log(prediction.measured / prediction.predicted))
    if len(residuals) < 3:
        return None
    inside = 0
    for model, errors in residuals.items():
        factor = interval_factor({name: values for name, values in residuals.items() if name != model})
        inside += sum(abs(value) <= math.log(factor) + 1e-12 for value in errors) if factor else 0
    return inside / len(predictions)


def _summary(setting: str, quantity: str, predictor: str, architecture: str, members: Sequence[Prediction]) -> Summary:
    errors = 100.0 * np.array([member.error for member in members])
    has_interval = (quantity, predictor) in (("latency", STACK), ("latency", SCALED), ("memory", ALLOCATION)) or (
        quantity.startswith("Creq") and predictor == STACK
    )
    inside = coverage(members) if has_interval else None
    coverage_pct = None if inside is None else 100.0 * inside
    return Summary.of_errors(setting, quantity, predictor, architecture, errors, coverage_pct)


def _of_requirements(case: ModelCase, model: LearnedModel, rest: TrainingSet) -> list[Prediction]:
    """Return Creq and Mreq by the stack, its constituents, and the geometric mean of the other architectures."""
    predictions = []
    for requirement, measured in case.requirements.items():
        quantity = requirement if requirement == MREQ else f"Creq {requirement}"
        values = {
            name: predict_requirement(regressor, requirement, case.graph, model.device, case.launched)
            for name, regressor in model.requirements.get(requirement, {}).items()
        }
        others = [other.requirements[requirement] for other in rest.cases if requirement in other.requirements]
        if others:
            values[CONSTANT] = math.exp(float(np.log(others).mean()))
        predictions += [_prediction(UNSEEN, quantity, name, case, measured, value) for name, value in values.items()]
    return predictions


def _of_ops(ops: OpTimes, model: LearnedModel, architecture: str) -> list[Prediction]:
    mask = np.array([group == architecture for group in ops.groups])
    if not mask.any():
        return []
    features, measured = ops.features[mask], ops.times_ns[mask]
    predicted = {name: model.predicted_ns(features, name) for name in model.times}
    predicted[ROOFLINE] = ops.least_ns[mask] + NODE_NS
    return [
        Prediction(UNSEEN, "op time", name, architecture, 0, float(true), float(predicted_ns))
        for name, values in predicted.items()
        for true, predicted_ns in zip(measured, values, strict=True)
    ]


def _of_case(case: ModelCase, model: LearnedModel) -> list[Prediction]:
    predictions = []
    for name in model.times:
        predicted = model.latency_ms(case.graph, case.share, name)
        predictions.append(_prediction(UNSEEN, "latency", name, case, case.latency_ms, predicted))
    least_ms = float(roofline_ns(graph_facts(case.graph), model.device, case.share).sum()) / 1e6
    predictions.append(_prediction(UNSEEN, "latency", ROOFLINE, case, case.latency_ms, least_ms))
    if case.memory_bytes and model.memory is not None:
        least = float(case.graph.weight_bytes + peak_activation_bytes(case.graph))
        for name, predicted in ((ALLOCATION, model.memory.peak_bytes(case.graph)), (ROOFLINE, least)):
            predictions.append(_prediction(UNSEEN, "memory", name, case, case.memory_bytes, predicted))
    return predictions


def _prediction(
    setting: str, quantity: str, predictor: str, case: ModelCase, measured: float, predicted: float
) -> Prediction:
    name = case.graph.name if setting == NEW_BATCH else case.architecture
    return Prediction(setting, quantity, predictor, name, case.graph.batch, measured, predicted)


#: Units that can be held out, and their columns in every table.
HELD_OUT_UNITS = {"models": "model", "devices": "device"}


@dataclass(frozen=True, slots=True)
class HeldOutLatency:
    """A measured latency, and the estimate of it from a database without the rows of its model or device."""

    unit: str  #: The held-out model or device.
    model: str
    device: str
    batch: int
    measured_ms: float
    predicted_ms: float | None  #: None where the estimator has no answer.
    is_inside: bool | None = None  #: Whether the estimate's interval holds the measurement; None without an interval.
    refusal: str = ""  #: The estimator's message where it has no answer.


def estimate_held_out(
    name: str,
    database: KernelDb,
    units: str,
    find_device: Callable[[str], Device],
    progress: Callable[[int, int], None] = lambda count, total: None,
) -> list[HeldOutLatency]:
    """Hold out each model or device in turn, and estimate its measured latencies from the rest of the database.

    Raises `InputError` when the database has fewer than two units, or the estimator cannot be made.

    Parameters
    ----------
    name : str
        Estimator, as in `gpuprof.estimators.builtin.make_estimator`.
    database : KernelDb
    units : str
        A key of `HELD_OUT_UNITS`.
    find_device : callable
        Returns the device of a name.
    progress : callable
        Called with the numbers of finished and of all units.
    """
    measured = read_measured(database)
    sets = _group_by_unit(measured, units)
    if len(sets) < 2:
        held = count_of(len(sets), HELD_OUT_UNITS[units])
        raise InputError(f"{database.path} holds {held}, but holding out {units} takes at least 2", "profile more")
    latencies: list[HeldOutLatency] = []
    for count, unit in enumerate(sets):
        progress(count, len(sets))
        with TemporaryDirectory() as folder:
            rest = copy_without(database, HELD_OUT_UNITS[units], unit, Path(folder) / "db")
            files = {model.name: Path(model.path) for model in sets[unit] if model.path and Path(model.path).is_file()}
            estimator = make_estimator(name, rest, files)
            for model in sets[unit]:
                devices = [unit] if units == "devices" else list(model.points)
                latencies += _estimate_model(estimator, unit, model, devices, find_device)
    progress(len(sets), len(sets))
    return latencies


def copy_without(database: KernelDb, column: str, value: str, path: Path) -> KernelDb:
    """Return a copy of a database at ``path`` without the rows with this value in a column.

    Runs with the value are removed entirely, since rows of neighbours reveal it; imported runs of many models lose only
    its rows.
    """
    copy = KernelDb.create(path)
    tables = {table: database.read_table(table) for table in TABLES}
    beside = tables["colocations"].filter(pc.equal(tables["colocations"][column], value))["run_id"]
    runs = tables["runs"].filter(pc.not_equal(tables["runs"][column], value))
    run_ids = runs.filter(pc.invert(pc.is_in(runs["run_id"], beside.combine_chunks())))["run_id"].combine_chunks()
    for table, rows in tables.items():
        kept_rows = rows.filter(pc.is_in(rows["run_id"], run_ids))
        if column in rows.column_names:
            kept_rows = kept_rows.filter(pc.not_equal(kept_rows[column], value))
        tables[table] = kept_rows
    if len(run_ids):
        copy.append_tables("held-out", tables)
    return copy


def _group_by_unit(measured: Mapping[str, MeasuredModel], units: str) -> dict[str, list[MeasuredModel]]:
    sets: dict[str, list[MeasuredModel]] = {}
    for model in measured.values():
        base = model.name.partition("[")[0]
        for unit in model.points if units == "devices" else (base,) if model.points else ():
            sets.setdefault(unit, []).append(model)
    return sets


def _estimate_model(
    estimator: Estimator, unit: str, model: MeasuredModel, devices: Sequence[str], find_device: Callable[[str], Device]
) -> Iterator[HeldOutLatency]:
    for name in devices:
        device = find_device(name)
        for point in model.points[name]:
            truth = point.latency_ms
            try:
                figure = estimator.estimate(
                    model.name, device, point.batch, point.share, processes=point.processes
                ).latency_ms
            except GpuprofError as error:
                yield HeldOutLatency(unit, model.name, name, point.batch, truth, None, refusal=str(error))
                continue
            inside = None if figure.interval is None else figure.interval[0] <= truth <= figure.interval[1]
            yield HeldOutLatency(unit, model.name, name, point.batch, truth, figure.value, inside)


def summarise_held_out(latencies: Sequence[HeldOutLatency], name: str, units: str, by_unit: bool) -> list[Summary]:
    """Return the errors of an estimator, for all held-out units together or for each."""
    groups: dict[str, list[HeldOutLatency]] = {}
    for latency in latencies:
        groups.setdefault(latency.unit if by_unit else "", []).append(latency)
    return [
        _summarise(name, units.removesuffix("s"), unit, members)
        for unit, members in groups.items()
        if any(latency.predicted_ms is not None for latency in members)
    ]


def _summarise(name: str, setting: str, unit: str, latencies: Sequence[HeldOutLatency]) -> Summary:
    ratios = [latency.predicted_ms / latency.measured_ms for latency in latencies if latency.predicted_ms is not None]
    errors = 100.0 * np.abs(np.array(ratios) - 1.0)
    inside = [latency.is_inside for latency in latencies if latency.is_inside is not None]
    coverage_pct = 100.0 * sum(inside) / len(inside) if inside else None
    return Summary.of_errors(setting, "latency", name, unit, errors, coverage_pct)
