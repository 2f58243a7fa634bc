"""Training of the regressors that estimate unprofiled models, and their evaluation on held-out measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError
from gpuprof.pipeline.devices import database_path, open_database, open_existing, resolve_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Names, Settings, option

if TYPE_CHECKING:
    from gpuprof.estimators.held_out import HeldOutLatency, Prediction, Summary
    from gpuprof.estimators.learned.training_set import TrainingSet


class TrainOptions(Settings):
    """Training data, and regressors to stack."""

    title: ClassVar[str] = "Data and regressors"

    device: str | None = option(None, "Device that was profiled; default: the one with most data.", values="devices")
    regressors: Names = option(
        ("lasso", "kernel_ridge", "gradient_boosting", "xgboost"),
        "Regressors to stack, separated by commas; lightgbm may be added.",
    )
    db: Path | None = option(None, "Kernel database; default: GPUPROF_DB, or gpuprof-db.")


@dataclass(frozen=True, kw_only=True)
class TrainResult(Result):
    """The training set and the errors of fitted regressors.

    Attributes
    ----------
    architectures, ops, points : int
        Networks, distinct ops, and models at a batch size, in the training set.
    latency_factor, memory_factor, creq_factor : float or None
        90% of left-out figures are within this factor of the prediction; None: too few architectures to say. Creq is
        judged by the metric with the largest factor.
    data_hash : str
        Hash of the training set.
    folder : Path
        Folder of the regressors.
    """

    device: str
    architectures: int
    ops: int
    points: int
    latency_factor: float | None
    memory_factor: float | None
    creq_factor: float | None
    data_hash: str
    folder: Path

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a single row."""
        factors = ("latency_factor", "memory_factor", "creq_factor")
        names = ("device", "architectures", "ops", "points", *factors, "data_hash")
        return [{name: getattr(self, name) for name in names}]


def train(
    options: TrainOptions | None = None, *, progress: ProgressCallback = say_nothing, **fields: Any
) -> TrainResult:
    """Fit regressors to the measured ops and models of a device; `gpuprof.estimate` uses them from then on.

    Raises `InputError` when there is no database, its data are too few to learn from, or a regressor is unknown.

    Parameters
    ----------
    options : TrainOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    Networks drawn at random are small, so that measuring and fitting take seconds:

    >>> import gpuprof
    >>> files = [gpuprof.build_model("random_mlp", f"mlp{seed}.onnx", seed=seed) for seed in range(3)]
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(files, batches=(1,), shares=("100",), device="cpu", db="db", settings=quick)
    >>> fitted = gpuprof.train(regressors=("lasso",), db="db")
    >>> fitted.architectures, fitted.folder.is_dir()
    (3, True)
    """
    from gpuprof.estimators.conformal import interval_factor
    from gpuprof.estimators.learned.learned import fit_with_intervals, make_constituents, save_model
    from gpuprof.estimators.learned.training_set import MREQ

    chosen = TrainOptions.collect(options, fields)
    names = list(chosen.regressors)
    make_constituents(names)  # reject an unknown name before any data is read
    progress(Progress("reading what was measured", 0, 1))
    data = load_training_data(chosen)
    ops = 0 if data.ops is None else len(data.ops.times_ns)
    what = f"fitting to {ops:,} ops of {count_of(len(data.architectures), 'architecture')}"
    model = fit_with_intervals(data, names, lambda count, total: progress(Progress(what, count, total)))
    folder = save_model(model, database_path(chosen.db), data.data_hash, data.architectures)
    factors = {quantity: interval_factor(errors) for quantity, errors in model.residuals.items()}
    creq = [factor for quantity, factor in factors.items() if factor and quantity not in ("latency", MREQ)]
    return TrainResult(
        notes=(f"wrote {folder}",),
        device=data.device.name,
        architectures=len(data.architectures),
        ops=ops,
        points=len(data.cases),
        latency_factor=factors.get("latency"),
        memory_factor=factors.get(MREQ),
        creq_factor=max(creq, default=None),
        data_hash=data.data_hash,
        folder=folder,
    )


def load_training_data(options: TrainOptions) -> TrainingSet:
    """Return the measurements on a device. Raises `InputError` when there is no database, or its data are too few."""
    from gpuprof.estimators.learned.training_set import database_graphs, load_training_set

    database = open_database(options.db)
    assert database is not None
    return load_training_set(database, resolve_device(options.device, database), database_graphs(database))


class EvaluateOptions(TrainOptions):
    """Data and regressors to evaluate."""

    estimator: str | None = option(
        None, "Estimator to judge instead of the regressors: a name, or package.module:Class."
    )
    leave_out: Literal["models", "devices"] = option(
        "models", "Units left out in turn with --estimator: models or devices."
    )
    by_architecture: bool = option(False, "Show a line for each left-out unit instead of one for all.")


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(Result):
    """The errors of estimates.

    Attributes
    ----------
    summaries : tuple of Summary
        Errors by left-out part, quantity and predictor.
    predictions : tuple of Prediction
        Each figure predicted by regressors, with the measured figure.
    held_out : tuple of HeldOutLatency
        Each latency estimated by ``estimator``, with the measured latency.
    """

    summaries: tuple[Summary, ...]
    predictions: tuple[Prediction, ...] = ()
    held_out: tuple[HeldOutLatency, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each summary, errors in percent."""
        return [asdict(summary) for summary in self.summaries]


def evaluate(
    options: EvaluateOptions | None = None, *, progress: ProgressCallback = say_nothing, **fields: Any
) -> EvaluateResult:
    """Compare predictions with measurements that were left out of the fit.

    By default the regressors are judged, each architecture left out in turn, and batch sizes of known models; with
    ``estimator`` that estimator, on each model or device of the database in turn. Raises `InputError` when the database
    holds too little.

    Parameters
    ----------
    options : EvaluateOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    >>> import gpuprof
    >>> files = [gpuprof.build_model("random_mlp", f"mlp{seed}.onnx", seed=seed) for seed in range(3)]
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(files, batches=(1,), shares=("100",), device="cpu", db="db", settings=quick)
    >>> errors = gpuprof.evaluate(regressors=("lasso",), db="db").to_frame()
    >>> bool((errors["mean_pct"] >= 0).all())
    True
    """
    from gpuprof.estimators.held_out import leave_one_architecture_out, predict_left_out_batches, summarise_errors
    from gpuprof.estimators.learned.learned import make_constituents

    chosen = EvaluateOptions.collect(options, fields)
    if chosen.estimator is not None:
        return _judge_estimator(chosen, chosen.estimator, progress)
    make_constituents(chosen.regressors)  # reject wrong names before any data is read
    data = load_training_data(chosen)
    names, done = list(chosen.regressors), 0
    total = len(data.architectures)

    def count(_: str) -> None:
        nonlocal done
        done += 1
        progress(Progress("architectures", done, total))

    progress(Progress("architectures", 0, total))
    predictions = leave_one_architecture_out(data, names, count)
    predictions += predict_left_out_batches(data)
    return EvaluateResult(
        summaries=tuple(summarise_errors(predictions, chosen.by_architecture)), predictions=tuple(predictions)
    )


def _judge_estimator(chosen: EvaluateOptions, name: str, progress: ProgressCallback) -> EvaluateResult:
    from gpuprof.estimators.held_out import estimate_held_out, summarise_held_out

    database = open_existing(database_path(chosen.db))
    latencies = estimate_held_out(
        name,
        database,
        chosen.leave_out,
        lambda device: resolve_device(device, database),
        lambda count, total: progress(Progress(chosen.leave_out, count, total)),
    )
    if chosen.device is not None:
        device = resolve_device(chosen.device, database).name
        latencies = [latency for latency in latencies if latency.device == device]
    refusals = [latency for latency in latencies if latency.predicted_ms is None]
    if len(refusals) == len(latencies):
        reason = f": {refusals[0].refusal}" if refusals else ""
        raise InputError(f"the estimator {name!r} has no estimate for any latency that was left out{reason}")
    notes: tuple[str, ...] = ()
    if refusals:
        notes = (f"no estimate for {len(refusals)} of {len(latencies)} latencies, first: {refusals[0].refusal}",)
    return EvaluateResult(
        notes=notes,
        summaries=tuple(summarise_held_out(latencies, name, chosen.leave_out, chosen.by_architecture)),
        held_out=tuple(latencies),
    )
