"""Comparison of estimates with measurements left out of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpuprof.errors import InputError, unknown_name
from gpuprof.pipeline.devices import database_path, open_existing, resolve_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import option
from gpuprof.pipeline.train import TrainOptions, load_training_data

if TYPE_CHECKING:
    from gpuprof.estimators.held_out import HeldOutLatency
    from gpuprof.estimators.learned.evaluation import Prediction, Summary


class EvaluateOptions(TrainOptions):
    """Data and regressors to evaluate."""

    estimator: str | None = option(
        None, "Estimator to judge instead of the regressors: a name, or package.module:Class."
    )
    leave_out: str = option("models", "Units left out one at a time with --estimator: models or devices.")
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
    ``estimator`` that estimator, on each model or device of the database in turn.

    Parameters
    ----------
    options : EvaluateOptions, optional
        Fields may be given as keywords instead.
    progress : callable, optional
        Called after each architecture.

    Raises
    ------
    InputError
        When the database holds too little.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> folder = Path(tempfile.mkdtemp())
    >>> files = [gpuprof.build_model("random_mlp", folder / f"mlp{seed}.onnx", seed=seed) for seed in range(3)]
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(files, batches=(1,), shares=("100",), device="cpu", db=folder / "db", settings=quick)
    >>> errors = gpuprof.evaluate(regressors=("lasso",), db=folder / "db").to_frame()
    >>> bool((errors["mean_pct"] >= 0).all())
    True
    """
    from gpuprof.estimators.learned.evaluation import (
        leave_one_architecture_out,
        predict_left_out_batches,
        summarise_errors,
    )
    from gpuprof.estimators.learned.regressors import make_constituents

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
        summaries=tuple(summarise_errors(predictions, chosen.by_architecture)),
        predictions=tuple(predictions),
    )


def _judge_estimator(chosen: EvaluateOptions, name: str, progress: ProgressCallback) -> EvaluateResult:
    from gpuprof.estimators.held_out import HELD_OUT_UNITS, estimate_held_out, summarise_held_out

    if chosen.leave_out not in HELD_OUT_UNITS:
        raise unknown_name("unit to leave out", chosen.leave_out, list(HELD_OUT_UNITS))
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
